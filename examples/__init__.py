"""Programs to read and to run in a clone. A package, so that no installed `examples` hides it."""
