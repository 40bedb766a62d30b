"""Models on disk: each file is complete or absent, and reading one runs no code that it names."""
