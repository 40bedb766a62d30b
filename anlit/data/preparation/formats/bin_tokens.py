"""Pre-tokenised .bin files, as kjj0/fineweb10B-gpt2 has them.

bytes 0–1023    256 int32, little-endian: 20240520, 1, number of tokens, zeros
from 1024 on    the tokens, uint16, little-endian
"""

from pathlib import Path

import numpy as np

from anlit.errors import UserError

HEADER = np.dtype("<i4")
TOKEN = np.dtype("<u2")
HEADER_BYTES = 256 * HEADER.itemsize
MAGIC = 20240520
VERSION = 1
REMEDY = "fetch the file again, or leave it out"


def read_bin_header(path: Path) -> int:
    """Number of tokens in a .bin file.

    Raises:
        UserError: it is not such a file, of another version, or not as long as its header says.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    header = np.fromfile(path, HEADER, count=HEADER_BYTES // HEADER.itemsize)
    if size < HEADER_BYTES or tuple(header[:2]) != (MAGIC, VERSION):
        begins = f"it has {size:,} bytes and begins with {header[:2].tolist()} instead of {[MAGIC, VERSION]}"
        raise UserError(f"{path} is not a file of tokens, {begins}: {REMEDY}.")
    tokens = int(header[2])
    expected = HEADER_BYTES + tokens * TOKEN.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes where the {tokens:,} tokens of its header make {expected:,}: {REMEDY}."
        )
    return tokens


def read_bin_tokens(path: Path, part: int = 0, parts: int = 1) -> np.ndarray:
    """One part of a .bin file's tokens, as uint16, 1-d: those from n·part/parts on.

    Raises:
        UserError: it is not such a file, or has become shorter.
        OSError: it cannot be read.
    """
    n_tokens = read_bin_header(path)
    start, stop = (n_tokens * number // parts for number in (part, part + 1))
    tokens = np.fromfile(path, TOKEN, stop - start, offset=HEADER_BYTES + start * TOKEN.itemsize)
    if len(tokens) != stop - start:
        raise UserError(f"{path} ends before token {stop:,}: {REMEDY}.")
    return tokens
