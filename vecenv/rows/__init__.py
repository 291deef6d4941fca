"""What happens to a contiguous run of envs, and how its rows of memory are written."""
