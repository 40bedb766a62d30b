"""Checks of foreign names that become paths: of chunks, subsets, and files of the hub.

Every reader of a manifest, an index, a record or a listing of the hub uses them, so that no name leads out of its
folder.
"""

import re
from typing import Any

from anlit.errors import UserError

SHA256 = re.compile(r"[0-9a-f]{64}")
DRIVE = re.compile(r"[A-Za-z]:")
UNSAFE_CHARACTERS = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Backslashes, what steers a terminal, and what no file system can write."""
LONGEST_PART = 255  # bytes
UNSAFE_PARTS = {"", ".", ".."}


def checked_path(name: Any, where: str) -> str:
    """A relative path with slashes, such as "data/train-0.parquet".

    Args:
        name: what stands in the file or the listing.
        where: that file or listing, for the error.

    Raises:
        UserError: it is no text, is empty or absolute, or has an empty part, "." or "..", a part of more than 255
            bytes, a backslash, a control character or a drive letter.
    """
    if (
        not isinstance(name, str)
        or UNSAFE_CHARACTERS.search(name)
        or not UNSAFE_PARTS.isdisjoint(name.split("/"))
        or any(len(part.encode()) > LONGEST_PART for part in name.split("/"))
        or DRIVE.match(name)
    ):
        raise _outside(name, where)
    return name


def checked_name(name: Any, where: str) -> str:
    """One part of a path, such as "chunk-000000-00000-000.bin".

    Raises:
        UserError: it is not one, see `checked_path`.
    """
    if "/" in checked_path(name, where):
        raise _outside(name, where)
    return str(name)


def _outside(name: Any, where: str) -> UserError:
    return UserError(
        f"{where} names a file {name!r:.80}, which is not inside its folder: take the data from elsewhere."
    )


def checked_sha256(text: Any, where: str) -> str:
    """64 hex digits.

    Raises:
        UserError: it is something else.
    """
    if not (isinstance(text, str) and SHA256.fullmatch(text)):
        raise UserError(f"{where} has {text!r} where a SHA-256 belongs: take the data from elsewhere.")
    return text
