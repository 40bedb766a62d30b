"""Layers that the three architectures share below attention: norms and their constants, scaling vectors, positions."""
