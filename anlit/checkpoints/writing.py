"""Writes checkpoints so that each name stands for a complete one, also after a kill or on a full disk."""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from anlit.checkpoints.location import LAST, SHARDED
from anlit.errors import RunError

PARTIAL = ".partial-"
"""How the name of a file begins that is being written; `last` must not be its start."""


def write_durably(content: Any, path: Path) -> None:
    """torch.save into a new file, followed by fsync. A link of that name is replaced, not followed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def write_failed(path: Path, reason: str) -> RunError:
    """The error that ends a run that cannot save."""
    last = path.with_name(LAST)
    advice = f"{last} is complete, continue with --ckpt_path last" if last.exists() else "start the run again"
    return RunError(f"{path} could not be written ({reason}): make room or repair the disk; then {advice}")


def first_cause(error: BaseException) -> str:
    """The cause of an error in a few words: the operating system's error in the chain, or that of the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {first_cause(inner)}"
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        link = link.__cause__ or link.__context__
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def move_folder_away(path: Path) -> Path | None:
    """Prepare for a rename to `path`; returns the folder that `path` links to, None for a file or nothing.

    A copy of a run may have a folder instead of the link. A rename cannot replace a folder, so it is moved away.
    """
    if path.is_dir() and not path.is_symlink():
        moved = path.parent / SHARDED / f"{path.stem}-{uuid.uuid4().hex[:12]}"
        moved.parent.mkdir(exist_ok=True)
        os.replace(path, moved)
        return moved
    return linked_folder(path)


def linked_folder(path: Path) -> Path | None:
    """The folder of this run that a link points to, None for anything else."""
    folder = path.resolve()
    return folder if path.is_symlink() and folder.parent == path.parent.resolve() / SHARDED else None


def remove_if_unlinked(folder: Path | None) -> None:
    """Remove a sharded checkpoint's folder unless a link points to it."""
    if folder is None or folder.is_symlink() or folder.parent.is_symlink():
        return
    if all(linked_folder(name) != folder.resolve() for name in folder.parent.parent.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint of one file, or the link to a sharded one and its folder if no other link points to it."""
    folder = linked_folder(path)
    path.unlink(missing_ok=True)
    remove_if_unlinked(folder)
