"""`anlit benchmark`: how fast this machine does what training needs, measured beside other programs."""
