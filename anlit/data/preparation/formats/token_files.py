"""Files of tokens (.bin): 256 int32 of header, then uint16. A separator begins each document."""

from pathlib import Path

import numpy as np

from anlit.data.preparation.formats.text import foreign_file
from anlit.errors import UserError

HEADER_START = [20240520, 1]
"""Format and version. The number of tokens follows."""
HEADER_BYTES = 1024


def read_tokens(
    name: str, path: Path, vocab_size: int, piece: int = 0, n_pieces: int = 1
) -> np.ndarray:
    """Return the tokens of a piece of a file, shape (n,), uint16.

    Raises UserError if the file is not complete, or has a token beyond the vocabulary.
    """
    if (foreign := foreign_file(name, path)) is not None:
        raise UserError(f"{path} is {foreign}")
    size = path.stat().st_size
    n_tokens = (size - HEADER_BYTES) // 2
    expected = [*HEADER_START, n_tokens]
    header = np.fromfile(path, "<i4", len(expected)).tolist()
    if size < HEADER_BYTES or header != expected or size % 2:
        raise UserError(
            f"{path} is not a complete file of tokens (with {size:,} bytes it has to begin with "
            f"{expected} and begins with {header}): fetch the file again, or leave it out"
        )
    start = n_tokens * piece // n_pieces
    stop = n_tokens * (piece + 1) // n_pieces
    tokens = np.fromfile(path, "<u2", stop - start, offset=HEADER_BYTES + start * 2)
    if (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise UserError(
            f"{path} has token {largest}, and the vocabulary has {vocab_size}: fetch the file "
            "again if it is damaged, or give the tokenizer that made it (--tokenizer)"
        )
    return tokens
