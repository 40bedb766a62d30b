"""Reading and writing small files, and where they come from."""
