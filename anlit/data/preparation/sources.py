"""The files of a corpus on this machine: a folder in the hub's layout, or single texts."""

import hashlib
import os
import re
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from anlit.data.preparation.formats.text import foreign_format, read_range
from anlit.data.storage.manifest import TRAIN, VAL
from anlit.errors import UserError

CHOOSE_HUB_COPY = "set --source to the folder that holds the corpus in the hub's layout"
CHOOSE_TEXT = (
    "set --source (--data.source) to the folder with the text, --pattern (--data.pattern) to the "
    "names of its files, or --data.path to the folder that was prepared from them"
)
"""What to do if no file of the user's matches."""
OTHER_FORMAT = "other_format"
"""Reason to leave out a file: the source has the corpus in several formats."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus."""

    name: str  # path inside the corpus, with slashes
    size: int
    sha256: str | None = None
    split: str | None = None  # split of all its documents, if the source decides it
    path: Path | None = None  # on this machine; None: on the hub


class Listing(NamedTuple):
    """A corpus's files in the order of their preparation."""

    files: list[SourceFile]
    skipped: Mapping[str, list[str]] = {}  # reason → names of files that are left out
    bad: str = ""  # a file that only --on_bad skip may leave out, and its problem


class CorpusFiles:
    """Base class of the sources that a corpus is prepared from."""

    commit: str | None = None
    """Commit of the hub's repository. A preparation that goes on keeps to its first commit."""
    paths: Mapping[str, Path] = {}
    """The files on this machine by their names. Listing them is cheap."""
    settings: Mapping[str, Any] = {}
    """Settings that identify the source, besides the names and sizes of its files."""

    def listing(self) -> Listing:
        """List all files of the corpus. Raise UserError if none can be reached."""
        raise NotImplementedError

    def fetch(self, file: SourceFile, folder: Path) -> Path:
        """Return a file's path on this machine. A file of the hub is put into `folder` first."""
        assert file.path is not None
        return file.path

    def release(self, file: SourceFile, folder: Path) -> None:
        """Remove the fetched copy of a file, which is not needed any more."""

    def refuse_if_empty(self) -> None:
        """Raise UserError if no local file matches, before a folder for shards is made."""


class LocalFiles(CorpusFiles):
    """A folder with the corpus, in the first of several layouts (lists of globs) that matches.

    `remedy` tells what to do if no file matches.
    """

    def __init__(
        self,
        root: str | Path,
        layouts: Sequence[Sequence[str]],
        remedy: str = CHOOSE_HUB_COPY,
    ) -> None:
        self.root = Path(root)
        self.remedy = remedy
        self.patterns = " or ".join(layouts[0])
        all_names: set[str] = set()
        for layout in layouts:
            files: dict[str, Path] = {}
            for pattern in layout:
                files |= list_files(root, pattern)
            self.paths = self.paths or files
            all_names.update(files)
        self.other_formats = sorted(all_names - set(self.paths))
        """Files of other layouts, which may be copies."""

    def refuse_if_empty(self) -> None:
        if not self.paths:
            raise self._no_files()

    def listing(self) -> Listing:
        files: list[SourceFile] = []
        irregular: list[str] = []
        for name, path in self.paths.items():
            if path.is_file():
                files.append(SourceFile(name, path.stat().st_size, path=path))
            else:
                irregular.append(name)
        if not files:
            raise self._no_files()
        files.sort(key=lambda file: (natural_order(file.name), file.name))
        skipped: dict[str, list[str]] = {}
        bad = ""
        if irregular:
            skipped["unreadable"] = irregular
            bad = f"{self.paths[irregular[0]]}: it is not a regular file"
        if self.other_formats:
            skipped[OTHER_FORMAT] = self.other_formats
        return Listing(files, skipped, bad)

    def _no_files(self) -> UserError:
        problem = f"There is no folder {self.root}"
        if self.root.is_dir():
            problem = f"{self.root} has no file that matches {self.patterns}"
        return UserError(f"{problem}: {self.remedy}")


class DistinctTexts(CorpusFiles):
    """Text files. Every different file is a document, held out or not by a hash of its content.

    Empty files and copies are dropped. The documents are in the order of their content hashes: a
    shuffled order that does not depend on the folder.

    Args:
        paths: the files by their names.
        val_fraction: fraction of the documents to hold out.
        description: the files in an error message.
        may_skip: whether files that are not text are left out without asking the user.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        val_fraction: float,
        description: str,
        may_skip: bool = False,
    ) -> None:
        self.paths = paths
        self.val_fraction = val_fraction
        self.description = description
        self.may_skip = may_skip
        self.settings = {"val_fraction": val_fraction}

    def refuse_if_empty(self) -> None:
        if not self.paths:
            raise UserError(f"No file matches {self.description}: {CHOOSE_TEXT}")

    def listing(self) -> Listing:
        self.refuse_if_empty()
        skipped: dict[str, list[str]] = {}
        distinct: dict[str, SourceFile] = {}
        bad = ""
        for name, path in self.paths.items():
            content, problem, detail = _read_text(path)
            if detail:
                bad = bad or f"{path}: {detail}"
            sha256 = hashlib.sha256(content).hexdigest()
            if not problem and sha256 in distinct:
                problem = "duplicate"
            if problem:
                skipped.setdefault(problem, []).append(name)
            else:
                distinct[sha256] = SourceFile(name, len(content), sha256, TRAIN, path)
        files = [distinct[sha256] for sha256 in sorted(distinct)]
        if len(files) < 2:
            first_bad = f" ({bad})" if bad else ""
            raise UserError(
                f"The corpus has {len(files)} different non-empty UTF-8 file(s) out of "
                f"{len(self.paths)}{first_bad}, and training and validation need a document each: "
                "write each document to its own file, or to a line of a .jsonl file with "
                "--pattern '*.jsonl', or set --source (--data.source) to more text"
            )
        # A handful of files may all be on one side; the smallest and largest hash are kept apart.
        n_val = sum(is_held_out(str(file.sha256), self.val_fraction) for file in files)
        n_val = min(max(n_val, 1), len(files) - 1)
        files[:n_val] = [replace(file, split=VAL) for file in files[:n_val]]
        return Listing(files, skipped, "" if self.may_skip else bad)


def _read_text(path: Path) -> tuple[bytes, str, str]:
    """Return the content of a text file, its problem and the detail. Both are "" if it is a text.

    An empty file is a problem without a detail.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise OSError(0, "it is not a regular file")
        content = path.read_bytes()
    except OSError as error:
        return b"", "unreadable", f"it cannot be read ({error.strerror})"
    foreign = foreign_format(content)
    if foreign is not None:
        return content, "wrong_format", f"it is {foreign}"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return content, "not_utf8", f"it is not UTF-8 ({error})"
    return content, "" if text else "empty", ""


def list_files(root: str | Path, pattern: str) -> dict[str, Path]:
    """Return the files under `root` that match a glob pattern, by their names below it, sorted.

    Links are followed, and entries that are neither file nor folder are returned too. A folder that
    has several names, or contains itself, is read once, by its name without links.
    """
    files: dict[str, Path] = {}
    names = _names_of(pattern)
    visited: set[tuple[int, int, int]] = set()
    waiting = deque([(Path(root), 0)] if names else [])
    while waiting:
        folder, depth = waiting.popleft()
        is_recursive = names[depth] == "**"
        name_pattern = names[depth + is_recursive]
        is_last = depth + is_recursive == len(names) - 1
        for entry in _entries(folder, depth, visited):
            path = folder / entry.name
            is_match = fnmatchcase(entry.name, name_pattern)
            if not os.path.isdir(path):
                if is_match and is_last:
                    files[path.relative_to(root).as_posix()] = path
                continue
            add = waiting.append if entry.is_symlink() else waiting.appendleft
            if is_match and not is_last:
                add((path, depth + is_recursive + 1))
            if is_recursive:
                add((path, depth))
    return {name: files[name] for name in sorted(files, key=lambda name: name.split("/"))}


def _names_of(pattern: str) -> list[str]:
    """Return the names in a glob pattern. Each `**` stands before the name that it leads to."""
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
    """Return the sorted entries of a folder. None if `visited` has it at this depth."""
    try:
        status = folder.stat()
        visit = (status.st_dev, status.st_ino, depth)
        if visit in visited:
            return []
        visited.add(visit)
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"{folder} cannot be listed ({error.strerror}): make it readable, or choose a pattern "
            "or a source without it"
        ) from error


def list_python_library(include_site_packages: bool) -> dict[str, Path]:
    """Return every *.py of Python's standard library, and of installed packages, by name."""
    paths = sysconfig.get_paths()
    package_folders = {"site-packages", "dist-packages"}
    files: dict[str, Path] = {}
    for name, path in list_files(paths["stdlib"], "**/*.py").items():
        if package_folders.isdisjoint(Path(name).parts):
            files[name] = path
    if include_site_packages:
        for folder in sorted({paths["purelib"], paths["platlib"]}):
            files |= list_files(folder, "**/*.py")
    return files


def natural_order(name: str) -> list[Any]:
    """Sort key that puts file 2 before file 10."""
    return [int(run) if run.isdecimal() else run for run in re.split(r"(\d+)", name)]


def is_held_out(sha256: str, fraction: float) -> bool:
    """Whether a document with this content hash belongs to validation: the smallest hashes do."""
    return int(sha256[:8], 16) < fraction * 2**32


def lines_sha256(lines: Iterable[str]) -> str:
    """Hash a list of texts. Names of files in them may hold bytes that are not UTF-8."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def file_sha256(path: str | Path, piece: int = 0, n_pieces: int = 1) -> str:
    """Hash the bytes of a file from size·piece/n_pieces on, SHA-256 in hex."""
    digest = hashlib.sha256()
    size = Path(path).stat().st_size
    start = size * piece // n_pieces
    stop = size * (piece + 1) // n_pieces
    for buffer in read_range(Path(path), start, stop):
        digest.update(buffer)
    return digest.hexdigest()
