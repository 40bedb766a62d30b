"""The files of a folder that match a glob pattern, and their order."""

import os
import re
import sysconfig
from collections import deque
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from anlit.errors import UserError


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
    """Return the names in a glob pattern; each `**` stands before the name that it leads to."""
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
    """Return the sorted entries of a folder; none if `visited` has it at this depth."""
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
