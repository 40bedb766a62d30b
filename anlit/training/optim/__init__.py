"""Optimizers over named parameter groups, and the learning rate over a run."""
