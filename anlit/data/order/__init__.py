"""In which order blocks of tokens are drawn, in what proportions, and how they become batches."""
