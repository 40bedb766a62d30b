"""Models on disk: written whole or not at all, and read without running what a file names."""
