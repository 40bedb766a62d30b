"""Pre-tokenised .bin files, as kjj0/fineweb10B-gpt2 has them.

bytes 0–1023    256 int32, little-endian: 20240520, 1, number of tokens, zeros
from 1024 on    the tokens, uint16, little-endian
"""

from pathlib import Path

import numpy as np

from anlit.errors import UserError

TOKEN_BYTES, HEADER_BYTES = 2, 1024
BEGINNING = [20240520, 1]  # which format, and its version
REMEDY = "fetch the file again, or leave it out"


def read_bin_tokens(path: Path, part: int = 0, parts: int = 1) -> np.ndarray:
    """One part of a .bin file's tokens, as uint16, 1-d: those from n·part/parts on.

    Raises:
        UserError: it is not such a file, of another version, not as long as its header says, or has become shorter.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4).tolist()
    if size < HEADER_BYTES or header[:2] != BEGINNING:
        begins = f"it has {size:,} bytes and begins with {header[:2]} instead of {BEGINNING}"
        raise UserError(f"{path} is not a file of tokens, {begins}: {REMEDY}.")
    n_tokens = header[2]
    if size != (expected := HEADER_BYTES + n_tokens * TOKEN_BYTES):
        raise UserError(
            f"{path} has {size:,} bytes where the {n_tokens:,} tokens of its header make {expected:,}: {REMEDY}."
        )
    start, stop = (n_tokens * number // parts for number in (part, part + 1))
    tokens = np.fromfile(path, "<u2", stop - start, offset=HEADER_BYTES + start * TOKEN_BYTES)
    if len(tokens) != stop - start:
        raise UserError(f"{path} ends before token {stop:,}: {REMEDY}.")
    return tokens
