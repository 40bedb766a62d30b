"""`anlit evaluate`: downstream tasks of the lm-evaluation-harness over checkpoints of anlit."""
