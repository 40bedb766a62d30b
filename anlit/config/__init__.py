"""The settings of a run: their schema, the objects that they describe, files and messages."""
