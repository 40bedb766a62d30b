"""Where a corpus's files come from: a local copy in the hub's layout, or single texts; `hub` has the third way."""

import hashlib
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from anlit.data.preparation.formats.base import foreign_format, read_range
from anlit.data.storage.manifest import TRAIN, VAL
from anlit.errors import UserError

OTHER_FORMAT = "other_format"
"""Why a file is left out: the source has the corpus in several formats."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; `name` is its path inside the corpus, with slashes."""

    name: str
    size: int
    sha256: str | None = None
    split: str | None = (
        None  # the split that all its documents belong to, where the source knows it
    )
    path: Path | None = None  # where it lies; None: on the hub


class Listing(NamedTuple):
    """A corpus's files in the order in which they are prepared, and what was left out of it by reason."""

    files: list[SourceFile]
    skipped: Mapping[str, list[str]] = {}
    bad: str = ""  # the first file that may be left out only if the user says so, and what is wrong with it


class Source:
    """Base of what `anlit prepare` reads from."""

    commit: str | None = (
        None  # of the hub's repository; a preparation keeps to the one that it began with
    )
    paths: Mapping[
        str, Path
    ] = {}  # of the files on this machine, by their names: a cheap sign of changes
    settings: Mapping[
        str, Any
    ] = {}  # what identifies the source, besides the names and sizes of its files

    def listing(self) -> Listing:
        """All files of the corpus; UserError if there are none, or they cannot be reached."""
        raise NotImplementedError

    def fetched(self, file: SourceFile, folder: Path) -> Path:
        """The file on this machine; one of the hub is put into `folder`, if it is not there yet."""
        assert file.path is not None
        return file.path

    def release(self, file: SourceFile, folder: Path) -> None:
        """Remove a fetched copy, which is not needed any more."""


class LocalFiles(Source):
    """A folder that holds the corpus: the files of the first layout, a list of globs, that has any."""

    def __init__(self, root: str | Path, *layouts: Sequence[str]) -> None:
        self.root = Path(root)
        self.wanted = " or ".join(layouts[0])
        files_by_layout = [_files_of(root, layout) for layout in layouts]
        self.paths = next(filter(None, files_by_layout), {})
        others = {name for files in files_by_layout for name in files}
        self.other_formats = sorted(others - set(self.paths))  # they may be copies of the first

    def listing(self) -> Listing:
        regular = {name: path for name, path in self.paths.items() if path.is_file()}
        if not regular:
            lack = f"{self.root} has no file that matches {self.wanted}"
            lack = lack if self.root.is_dir() else f"There is no folder {self.root}"
            raise UserError(
                f"{lack}: set --source to the folder that holds the corpus in the hub's layout."
            )
        files = [SourceFile(name, path.stat().st_size, path=path) for name, path in regular.items()]
        others = [name for name in self.paths if name not in regular]
        bad = f"{self.paths[others[0]]}: it is no regular file" if others else ""
        in_order = sorted(files, key=lambda file: (natural(file.name), file.name))
        skipped = {"unreadable": others, OTHER_FORMAT: self.other_formats}
        return Listing(in_order, {reason: names for reason, names in skipped.items() if names}, bad)


class DistinctTexts(Source):
    """Every different UTF-8 file of a list is a document, held out or not by a hash of its content.

    Empty files and copies are dropped, and the documents are in the order of their content hashes, which is a shuffled
    order and the same wherever the files lie. What is no text is bad, unless it is `expected`.
    """

    def __init__(
        self, paths: Mapping[str, Path], val_fraction: float, what: str, expected: bool = False
    ) -> None:
        self.paths, self.val_fraction, self.what, self.expected = (
            paths,
            val_fraction,
            what,
            expected,
        )
        self.settings = {"val_fraction": val_fraction}

    def listing(self) -> Listing:
        if not self.paths:
            raise UserError(
                f"No file matches {self.what}: set --source (--data.source) to the folder with the text, "
                "or --pattern (--data.pattern) to what its files are called."
            )
        skipped: dict[str, list[str]] = {}
        distinct: dict[str, SourceFile] = {}
        bad = ""
        for label, path in self.paths.items():
            content = b""
            try:
                if path.exists() and not path.is_file():  # a pipe may never end
                    raise OSError(0, "it is no regular file")
                content = path.read_bytes()
                foreign = foreign_format(content)
                if foreign is None:
                    problem = "" if content.decode("utf-8-sig") else "empty"
                else:
                    problem, bad = "wrong_format", bad or f"{path}: it is {foreign}"
            except OSError as error:
                problem, bad = "unreadable", bad or f"{path}: it cannot be read ({error.strerror})"
            except UnicodeDecodeError as error:
                problem, bad = "not_utf8", bad or f"{path}: it is not UTF-8 ({error})"
            file = SourceFile(label, len(content), hashlib.sha256(content).hexdigest(), TRAIN, path)
            if not problem and distinct.setdefault(str(file.sha256), file) is not file:
                problem = "duplicate"
            if problem:
                skipped.setdefault(problem, []).append(label)
        files = [distinct[sha256] for sha256 in sorted(distinct)]
        if len(files) < 2:
            raise UserError(
                f"The corpus has {len(files)} different non-empty UTF-8 file(s) out of {len(self.paths)}, and "
                "training and validation need one each: point the source at more text or widen the pattern."
            )
        # A handful of files may all fall on one side; the smallest and largest hash still go apart.
        n_val = sum(is_held_out(str(file.sha256), self.val_fraction) for file in files)
        n_val = min(max(n_val, 1), len(files) - 1)
        files[:n_val] = [replace(file, split=VAL) for file in files[:n_val]]
        return Listing(files, skipped, "" if self.expected else bad)


def _files_of(root: str | Path, patterns: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for pattern in patterns:
        files |= list_files(root, pattern)
    return files


def list_files(root: str | Path, pattern: str) -> dict[str, Path]:
    """What matches a glob pattern under `root`, but for folders, by the names below it, sorted.

    Links are followed. A folder that has several names, or contains itself, is read once. Its name
    without links comes first.
    """
    found: dict[str, Path] = {}
    names = _names_of(pattern)
    visited: set[tuple[int, int, int]] = set()
    waiting = deque([(Path(root), 0)] if names else [])
    while waiting:
        folder, depth = waiting.popleft()
        is_recursive = names[depth] == "**"
        wanted = names[depth + is_recursive]
        is_last = depth + is_recursive == len(names) - 1
        for entry in _entries(folder, depth, visited):
            path = folder / entry.name
            is_match = fnmatchcase(entry.name, wanted)
            if not os.path.isdir(path):
                if is_match and is_last:
                    found[path.relative_to(root).as_posix()] = path
                continue
            add = waiting.append if entry.is_symlink() else waiting.appendleft
            if is_match and not is_last:
                add((path, depth + is_recursive + 1))
            if is_recursive:
                add((path, depth))
    return {name: found[name] for name in sorted(found, key=lambda name: name.split("/"))}


def _names_of(pattern: str) -> list[str]:
    """The parts of a glob pattern; each `**` stands before the name that it leads to."""
    names: list[str] = []
    for name in PurePosixPath(pattern).parts:
        if name != "**" or names[-1:] != ["**"]:
            names.append(name)
    if names[-1:] == ["**"]:
        names.append("*")
    return names


def _entries(
    folder: Path, depth: int, visited: set[tuple[int, int, int]]
) -> list[os.DirEntry[str]]:
    """What lies in a folder, sorted; nothing if it was read at this depth of the pattern before."""
    try:
        status = folder.stat()
        place = (status.st_dev, status.st_ino, depth)
        if place in visited:
            return []
        visited.add(place)
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"{folder} cannot be listed ({error.strerror}): make it readable, or choose a pattern "
            "or a source without it."
        ) from error


def is_held_out(sha256: str, fraction: float) -> bool:
    """Whether a document with this content hash belongs to validation: the smallest hashes do."""
    return int(sha256[:8], 16) < fraction * 2**32


def natural(name: str) -> list[Any]:
    """Sort key that puts file 2 before file 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def lines_sha256(lines: Any) -> str:
    """Hash of a list of texts, in which names of files may hold bytes that are not UTF-8."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def file_sha256(path: str | Path, part: int = 0, parts: int = 1) -> str:
    """SHA-256 of a file's bytes from size·part/parts on, in hex."""
    digest, size = hashlib.sha256(), Path(path).stat().st_size
    for piece in read_range(Path(path), size * part // parts, size * (part + 1) // parts):
        digest.update(piece)
    return digest.hexdigest()
