"""Source files: what is known about one, and whether it has changed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from anlit.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; `name` is its path inside the corpus, with slashes."""

    name: str
    size: int
    sha256: str | None = None
    split: str | None = None
    """The split that all its documents belong to, where the source knows it."""


FileState = tuple[int, int, int, int]
"""Inode, bytes, and the times of the last change of content and of attributes, in ns."""


def state_of(path: Path) -> FileState:
    """The state of a file, which changes whenever its content does."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def refuse_changed(path: Path, state: FileState) -> None:
    """Refuse a file that has changed since its hash was taken; called after it has been read.

    Raises:
        UserError: the file has changed since `state`.
    """
    if state_of(path) != state:
        raise UserError(
            f"{path} was changed while it was read: repeat the command when nothing writes to it any more; what is "
            "done so far is kept."
        )


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
