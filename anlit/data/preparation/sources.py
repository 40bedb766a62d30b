"""Where a corpus's files come from, the source that is a local copy, and whether a file has changed."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Raise UserError if a file, which has been read, has changed since the `state` before its hash was taken."""
    if state_of(path) != state:
        raise UserError(
            f"{path} was changed while it was read: repeat the command when nothing writes to it any more; what is "
            "done so far is kept."
        )


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class Listing:
    """A corpus's files in the order in which they are prepared, and what was left out of it by reason."""

    files: list[SourceFile]
    skipped: dict[str, list[str]] = field(default_factory=dict)


class Source:
    """Base of what `anlit prepare` reads from."""

    checks_hashes = True
    """Whether `provide` gives only files with the hash that the listing has, if it has one."""

    def listing(self) -> Listing:
        """All files of the corpus; the same list every time.

        Raises:
            UserError: there are none, or they cannot be reached.
        """
        raise NotImplementedError

    def listing_sha256(self) -> str | None:
        """Hash over names and sizes, a cheap sign of a corpus that has changed; None if the files are not at hand."""
        return None

    def provide(self, file: SourceFile, folder: Path) -> Path:
        """The file on this machine; one that has to be fetched is put into `folder`."""
        raise NotImplementedError

    def release(self, file: SourceFile, folder: Path) -> None:
        """The file is not needed any more: a fetched copy is removed."""

    def settings(self) -> dict[str, Any]:
        """What identifies the source, besides the names and sizes of its files."""
        return {}

    def pinned(self) -> dict[str, Any]:
        """What stays fixed until the preparation ends, such as the hub's commit; asked for once, at its beginning."""
        return {}

    def pin(self, pinned: dict[str, Any]) -> None:
        """Keep to what an unfinished preparation has pinned."""


class LocalFiles(Source):
    """A folder that holds the corpus in the hub's own layout (or any files of a format that can be read).

    Args:
        layouts: which files, as globs under it: those of the first layout that has any.
    """

    checks_hashes = False

    def __init__(self, root: str | Path, *layouts: Sequence[str]) -> None:
        self.root, self.layouts = Path(root), layouts

    def listing(self) -> Listing:
        if not self.root.is_dir():
            raise UserError(f"There is no folder {self.root}: set --source to the folder that holds the corpus.")
        files = self._files()
        if not files:
            raise UserError(
                f"{self.root} has no file that matches {' or '.join(self.layouts[0])}: "
                "set --source to the folder that holds the corpus in the hub's layout."
            )
        return Listing(files)

    def listing_sha256(self) -> str | None:
        files = self._files()
        return names_and_sizes_sha256(files) if files else None

    def _files(self) -> list[SourceFile]:
        for patterns in self.layouts:
            found = {path for pattern in patterns for path in self.root.glob(pattern) if path.is_file()}
            if found:
                names = sorted((path.relative_to(self.root).as_posix() for path in found), key=natural)
                return [SourceFile(name, (self.root / name).stat().st_size) for name in names]
        return []

    def provide(self, file: SourceFile, folder: Path) -> Path:
        return self.root / file.name


def natural(name: str) -> list[Any]:
    """Sort key that puts file 2 before file 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def names_and_sizes_sha256(files: list[SourceFile]) -> str:
    lines = sorted(f"{file.name}\t{file.size}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
