"""Atomic writing of files, and numbers as JSON."""

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TextIO

from anlit.errors import UserError

TEMPORARY = ".tmp-"
"""A piece of the name of each file that is not yet complete."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end, even if the power fails.

    An exception removes the temporary file.
    """
    # Random, because machines that share the folder may have equal process ids. The dot hides the
    # file from *.json.
    temporary = path.with_name(f".{path.name}{TEMPORARY}{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """Yield a file that is open to append UTF-8. After an OSError it is as it was before."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            yield file
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically, as UTF-8 with Unix line ends.

    Lone surrogates, which file names may have, become escapes.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Replace `path` atomically by `content` as JSON, see `jsonable`.

    Without `indent` it is a single line without spaces.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(
        jsonable(content), ensure_ascii=False, indent=indent, separators=separators, allow_nan=False
    )
    write_text(path, text + "\n")


def jsonable(value: Any, digits: int | None = None) -> Any:
    """Return `value` as JSON types: numbers with `digits` significant digits (default: all).

    Numbers that are not finite become null, dataclasses and named tuples objects, arrays lists.
    Keys and all other types become strings.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): jsonable(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, digits) for item in value]
    if isinstance(value, float):
        return _jsonable_float(value, digits)
    return value if isinstance(value, str | int | bool | None) else str(value)


def _jsonable_float(value: float, digits: int | None) -> float | None:
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


def output_folder(output: str) -> Path:
    """Make the folder of --output and return it. Raise UserError if it cannot be made."""
    with writing(Path(output), "made"):
        Path(output).mkdir(parents=True, exist_ok=True)
    return Path(output)


@contextmanager
def folder_to_fill(output: str) -> Iterator[Path]:
    """Yield `output_folder`. If it stays empty, remove it and the parents that were made."""
    new_folders = [path for path in (Path(output), *Path(output).parents) if not path.exists()]
    try:
        yield output_folder(output)
    finally:
        with suppress(OSError):  # it is filled
            for folder in new_folders:
                folder.rmdir()


@contextmanager
def writing(folder: Path, action: str = "written") -> Iterator[None]:
    """Turn errors of writing into --output into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be {action} ({error.strerror}): give a writable folder"
        ) from error


@contextmanager
def writing_new(folder: Path) -> Iterator[None]:
    """Turn errors of writing into a UserError; after any error leave the folder as it was.

    It was empty or missing. So the command can be repeated with the same --output.
    """
    was_there = folder.exists()
    try:
        with writing(folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if was_there:
            folder.mkdir(exist_ok=True)
        raise
