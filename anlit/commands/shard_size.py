"""The option of `anlit export` and `anlit import` for the size of a file of weights."""

import argparse
import re

from anlit.checkpoints.location import MAX_SHARD_SIZE

FILE_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?[KMGT]B", re.IGNORECASE)


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """Add `--max_shard_size` to the parser."""
    parser.add_argument(
        "--max_shard_size",
        type=file_size,
        default=MAX_SHARD_SIZE,
        metavar="SIZE",
        help="larger weights are written into several files of this size (default: %(default)s)",
    )


def file_size(text: str) -> str:
    """The type of an option that takes a size as transformers writes it: 500MB, 50GB."""
    amount = FILE_SIZE.fullmatch(text.strip())
    if amount is None or float(amount[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} must be a size such as 500MB or 50GB")
    return text
