"""What `anlit diagnose` does where no option says more; without torch, for --help."""

LENGTHS = (256, 1024, 4096)
"""Tokens per sequence."""
TOKENS = 16_384
"""Tokens read at each length."""
NORMAL_LENGTHS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Keys of independent normal scores."""
NORMAL_SEEDS = 1 << 63
