"""Layers that the three architectures share below attention."""
