"""Steps and resets a contiguous run of envs, and writes its rows of memory."""
