"""Where every byte is stored, and who owns it."""
