"""Evaluations, policies, exports, videos and plots of a run."""
