"""Adapters from vecenv's vector envs to the interfaces of other libraries. Each module imports its own library."""
