"""`anlit needle`: needle in a haystack."""
