"""Training on an imaginary device: what would fail on a GPU, or wait for it."""
