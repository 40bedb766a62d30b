"""Models on disk. Files are complete or absent. A reader runs no code that a file names."""
