"""`anlit evaluate`: downstream tasks of the lm-evaluation-harness on checkpoints of anlit."""
