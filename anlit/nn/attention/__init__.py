"""Attention in one general form: mechanisms (what), kernels (how), documents (whose keys)."""
