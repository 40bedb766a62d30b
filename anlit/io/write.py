"""Atomic writing of files, and numbers as JSON."""

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from anlit.errors import UserError

TEMPORARY = ".tmp-"
"""Part of the names of files that are being written."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` at the end, or is removed after an exception, safe in power cuts."""
    # Random, because machines that share the folder may have equal process ids; with a dot, which hides it from *.json.
    temporary = path.with_name(f".{path.name}{TEMPORARY}{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically, as UTF-8 with Unix line ends; lone surrogates, of file names, become escapes."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Replace `path` atomically by `content` as JSON, see `jsonable`; without `indent` in one line without spaces."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(
        jsonable(content), ensure_ascii=False, indent=indent, separators=separators, allow_nan=False
    )
    write_text(path, text + "\n")


def jsonable(value: Any, digits: int | None = None) -> Any:
    """`value` as JSON types, numbers with so many significant `digits` (default: all), null if not finite.

    Dataclasses and named tuples become objects, arrays lists, keys and what JSON does not have strings.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): jsonable(below, digits) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(below, digits) for below in value]
    if isinstance(value, float):
        return (
            None
            if not math.isfinite(value)
            else value
            if digits is None
            else float(f"{value:.{digits}g}")
        )
    return value if isinstance(value, str | int | bool | None) else str(value)


def output_folder(output: str) -> Path:
    """The folder that --output names, made where missing; UserError if it cannot be made."""
    with writing(Path(output), "made"):
        Path(output).mkdir(parents=True, exist_ok=True)
    return Path(output)


@contextmanager
def folder_to_fill(output: str) -> Iterator[Path]:
    """`output_folder`, which is removed again, with the parents that were made, where nothing comes to be in it."""
    made = [path for path in (Path(output), *Path(output).parents) if not path.exists()]
    try:
        yield output_folder(output)
    finally:
        with suppress(OSError):  # it is filled
            for path in made:
                path.rmdir()


@contextmanager
def writing(folder: Path, done: str = "written") -> Iterator[None]:
    """Turns errors of writing into --output into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be {done} ({error.strerror}): give a writable folder"
        ) from error
