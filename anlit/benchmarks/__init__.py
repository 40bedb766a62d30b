"""`anlit benchmark`: speed and memory of training on this machine, beside other programs."""
