"""A page to look at trained models: continuations next to each other, the loss of each token, attention statistics."""
