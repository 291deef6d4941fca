"""Gymnasium's vector env interface over a pool of rows."""
