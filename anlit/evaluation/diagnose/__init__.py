"""Attention statistics, of checkpoints and of normal scores: `anlit diagnose`."""
