"""`anlit diagnose`: attention statistics of checkpoints, or on normal scores."""
