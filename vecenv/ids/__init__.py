"""What a string names: an env, in one of two forms; a wrapper; the module that defines either."""
