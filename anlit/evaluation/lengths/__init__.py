"""Loss at and beyond the training length: `anlit lengths`."""
