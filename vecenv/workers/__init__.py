"""Pools that step rows in worker processes or in this process."""
