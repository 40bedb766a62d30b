"""Where a corpus's files come from: a local copy in the hub's layout, or single texts; `hub` has the third way."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anlit.data.preparation.formats.compressed import read_range
from anlit.data.storage.manifest import TRAIN, VAL
from anlit.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; `name` is its path inside the corpus, with slashes."""

    name: str
    size: int
    sha256: str | None = None
    split: str | None = None
    """The split that all its documents belong to, where the source knows it."""
    path: Path | None = None
    """Where it lies; None: on the hub."""


@dataclass
class Listing:
    """A corpus's files in the order in which they are prepared, and what was left out of it by reason."""

    files: list[SourceFile]
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def sha256(self) -> str:
        """Hash over all that is known of the files, wherever they lie."""
        lines = [f"{file.name}\t{file.size}\t{file.sha256}\t{file.split}" for file in self.files]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


class Source:
    """Base of what `anlit prepare` reads from."""

    commit: str | None = None
    """Of the hub's repository; a preparation keeps to the one that it began with."""

    def listing(self) -> Listing:
        """All files of the corpus; the same list every time.

        Raises:
            UserError: there are none, or they cannot be reached.
        """
        raise NotImplementedError

    def paths(self) -> dict[str, Path]:
        """The files that are on this machine, by their names: a cheap sign of a corpus that has changed."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What identifies the source, besides the names and sizes of its files."""
        return {}

    def fetched(self, file: SourceFile, folder: Path) -> Path:
        """The file on this machine; one of the hub is put into `folder`, if it is not there yet."""
        assert file.path is not None
        return file.path

    def release(self, file: SourceFile, folder: Path) -> None:
        """The file is not needed any more: a fetched copy is removed."""


class LocalFiles(Source):
    """A folder that holds the corpus in the hub's own layout (or any files of a format that can be read).

    Args:
        layouts: which files, as globs under it: those of the first layout that has any.
    """

    def __init__(self, root: str | Path, *layouts: Sequence[str]) -> None:
        self.root, self.layouts = Path(root), layouts

    def listing(self) -> Listing:
        if not self.root.is_dir():
            raise UserError(f"There is no folder {self.root}: set --source to the folder that holds the corpus.")
        files = [SourceFile(name, path.stat().st_size, path=path) for name, path in self.paths().items()]
        if not files:
            raise UserError(
                f"{self.root} has no file that matches {' or '.join(self.layouts[0])}: "
                "set --source to the folder that holds the corpus in the hub's layout."
            )
        return Listing(sorted(files, key=lambda file: (natural(file.name), file.name)))

    def paths(self) -> dict[str, Path]:
        for patterns in self.layouts:
            if files := {name: path for glob in patterns for name, path in list_files(self.root, glob).items()}:
                return files
        return {}


class DistinctTexts(Source):
    """Every different UTF-8 file of a list is a document, held out or not by a hash of its content.

    The files are read once beforehand: what is not text is left out, copies are dropped, and the documents are put in
    the order of their content hashes, which is a shuffled order and the same wherever the files lie.

    Args:
        find: gives the files, by labels that do not depend on where the corpus lies; called only when needed.
        val_fraction: part of the documents that is held out for validation, in (0, 1).
        nothing: the error about a corpus without any files.
    """

    def __init__(self, find: Callable[[], dict[str, Path]], val_fraction: float, nothing: str) -> None:
        self.find, self.val_fraction, self.nothing = find, checked_fraction(val_fraction), nothing

    @cached_property
    def _texts(self) -> dict[str, Path]:
        return self.find()

    def paths(self) -> dict[str, Path]:
        return self._texts

    def listing(self) -> Listing:
        if not self._texts:
            raise UserError(self.nothing)
        skipped: dict[str, list[str]] = {}
        distinct: dict[str, SourceFile] = {}
        for label, path in self._texts.items():
            problem, content = _read(path)
            sha256 = hashlib.sha256(content).hexdigest()
            if problem is None and sha256 in distinct:
                problem = "duplicate"
            if problem is not None:
                skipped.setdefault(problem, []).append(label)
            else:
                distinct[sha256] = SourceFile(label, len(content), sha256, TRAIN, path)
        return Listing(self._split([distinct[sha256] for sha256 in sorted(distinct)]), skipped)

    def _split(self, files: list[SourceFile]) -> list[SourceFile]:
        """The held-out files first, then the others."""
        if len(files) < 2:
            raise UserError(
                f"The corpus has {len(files)} different non-empty UTF-8 file(s) out of {len(self._texts)}, and "
                "training and validation need one each: point the source at more text or widen the pattern."
            )
        val = [file for file in files if is_held_out(str(file.sha256), self.val_fraction)]
        # A handful of files may all fall on one side; the smallest and largest hash still go apart.
        val = (val or files[:1])[: len(files) - 1]
        held_out = set(val)
        return [replace(file, split=VAL) for file in val] + [file for file in files if file not in held_out]

    def settings(self) -> dict[str, Any]:
        return {"val_fraction": self.val_fraction}


def list_files(root: Path, pattern: str) -> dict[str, Path]:
    """Files under `root` that match a glob pattern, by their names below it, sorted."""
    return {path.relative_to(root).as_posix(): path for path in sorted(root.glob(pattern)) if path.is_file()}


def checked_fraction(fraction: float) -> float:
    """Raise UserError unless the fraction of the documents leaves some on both sides."""
    if not 0 < fraction < 1:
        raise UserError(f"val_fraction must be between 0 and 1, not {fraction}.")
    return fraction


def is_held_out(sha256: str, fraction: float) -> bool:
    """Whether a document with this content hash belongs to validation."""
    return int(sha256[:8], 16) < fraction * 2**32


def natural(name: str) -> list[Any]:
    """Sort key that puts file 2 before file 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def file_sha256(path: str | Path, part: int = 0, parts: int = 1) -> str:
    """SHA-256 of a file's bytes from size·part/parts on, in hex."""
    digest, size = hashlib.sha256(), Path(path).stat().st_size
    for piece in read_range(Path(path), size * part // parts, size * (part + 1) // parts):
        digest.update(piece)
    return digest.hexdigest()


def _read(path: Path) -> tuple[str | None, bytes]:
    """The reason to leave a file out, and what is in it."""
    try:
        content = path.read_bytes()
        return None if content.decode() else "empty", content
    except OSError:
        return "unreadable", b""
    except UnicodeDecodeError:
        return "not_utf8", b""
