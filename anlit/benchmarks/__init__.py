"""`anlit benchmark`: the speed and memory of training on this machine, compared with other programs."""
