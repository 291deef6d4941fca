"""How rows are reached, in other processes or in this one."""
