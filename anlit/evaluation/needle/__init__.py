"""Needle in a haystack: `anlit needle`."""
