"""The order and the proportions in which blocks of tokens are drawn, and the loaders that make batches of them."""
