"""Attention in one general form: mechanisms (what), back ends (how), documents (whose keys)."""
