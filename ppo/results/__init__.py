"""Exports, videos and plots of a run."""
