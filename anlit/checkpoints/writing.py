"""Writes checkpoints so that each name stands for a complete one, also after a kill or on a full disk."""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from anlit.checkpoints.location import SHARDED, name_to_continue
from anlit.errors import RunError

PARTIAL = ".partial-"
"""How the name of a file or link begins that is not complete yet; `last` must not be its start."""


def write_durably(content: Any, path: Path) -> None:
    """torch.save into a new file, followed by fsync. A link of that name is replaced, not followed."""
    if path.is_dir() and not path.is_symlink():  # left by a killed run with sharded checkpoints
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def give_name(complete: Path, name: Path) -> None:
    """Rename a complete file or link atomically, and remove the sharded checkpoint that had the name before."""
    if (
        name.is_dir() and not name.is_symlink()
    ):  # in a copy of a run; a rename cannot replace a folder
        (name.parent / SHARDED).mkdir(exist_ok=True)
        os.replace(name, name.parent / SHARDED / f"{name.stem}-{uuid.uuid4().hex[:12]}")
    os.replace(complete, name)
    remove_unnamed(name.parent)


def remove_unnamed(checkpoints: Path) -> None:
    """Remove sharded checkpoints without a name: replaced ones, and incomplete ones of killed runs.

    What is a link or lies outside of the folder is left alone.
    """
    folders = checkpoints / SHARDED
    if folders.is_dir() and not folders.is_symlink():
        named = {
            name.resolve() for name in checkpoints.iterdir() if not name.name.startswith(PARTIAL)
        }
        for folder in folders.iterdir():
            if not folder.is_symlink() and folder.resolve() not in named:
                shutil.rmtree(folder, ignore_errors=True)


def write_failed(path: Path, reason: str) -> RunError:
    """The error that ends a run that cannot save."""
    advice = f"continue with --ckpt_path {name_to_continue(path.parent)}"
    return RunError(
        f"{path} could not be written ({reason}): make room or repair the disk; then {advice}"
    )


def first_cause(error: BaseException) -> str:
    """An error in a few words: the operating system's in its chain, else its first line; that of the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = min(error.failures.items())[1][0]
    link: BaseException | None = error
    while link is not None and not (isinstance(link, OSError) and link.strerror):
        link = link.__cause__ or link.__context__
    text = error if link is None else link.strerror  # type: ignore[attr-defined]
    return next(iter(str(text).splitlines()), "") or type(error).__name__
