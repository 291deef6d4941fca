"""Trained policies: loading them from run folders, evaluating them, and keeping the best one."""
