"""Models on disk: each file is complete or absent, and a reader runs no code that a file names."""
