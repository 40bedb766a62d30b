"""A page to look at trained models: continuations side by side, the loss of each token, what attention does."""
