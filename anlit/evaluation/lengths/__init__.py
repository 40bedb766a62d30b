"""`anlit lengths`: the loss at and beyond the training length."""
