"""What data and losses agree on."""

IGNORED = -100
"""Targets with this value do not count in the loss."""
