"""Writes checkpoints so that a name such as best.ckpt never has an incomplete checkpoint.

A new checkpoint is written under another name. It is renamed when it is complete. So a kill or a
full disk leaves the previous checkpoint in place. A sharded checkpoint is a folder in `.sharded`.
Its name is a link to the folder.
"""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from anlit.checkpoints.location import SHARDED
from anlit.checkpoints.newest import name_to_continue
from anlit.errors import RunError, error_chain, first_line

PARTIAL = ".partial-"
"""The start of the name of an incomplete file or link.

It must not start with `last`. Lightning takes such a file for the last checkpoint.
"""


def write_durably(content: Any, path: Path) -> None:
    """Save `content` as a new file, and wait until it is on the disk.

    A link of that name is replaced, not followed.
    """
    if path.is_dir() and not path.is_symlink():  # left by a killed run with sharded checkpoints
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def give_name(complete: Path, name: Path) -> None:
    """Rename the file or link `complete` to `name` atomically.

    The sharded checkpoint that had this name is removed.
    """
    if name.is_dir() and not name.is_symlink():
        # A copied run has a folder in place of the link. A rename cannot replace a folder.
        (name.parent / SHARDED).mkdir(exist_ok=True)
        os.replace(name, name.parent / SHARDED / f"{name.stem}-{uuid.uuid4().hex[:12]}")
    os.replace(complete, name)
    remove_unnamed(name.parent)


def remove_unnamed(checkpoints: Path) -> None:
    """Remove the sharded checkpoints without a name, replaced or incomplete after a kill.

    Links and folders elsewhere stay.
    """
    folders = checkpoints / SHARDED
    if folders.is_dir() and not folders.is_symlink():
        link_targets = set()
        for link in checkpoints.iterdir():
            if not link.name.startswith(PARTIAL):
                link_targets.add(link.resolve())
        for folder in folders.iterdir():
            if not folder.is_symlink() and folder.resolve() not in link_targets:
                shutil.rmtree(folder, ignore_errors=True)


def write_failed(path: Path, reason: str) -> RunError:
    """Make the error that ends a run that cannot save; the caller raises it."""
    return RunError(
        f"{path} could not be written ({reason}): make room or repair the disk; then continue with "
        f"--ckpt_path {name_to_continue(path.parent)}"
    )


def first_cause(error: BaseException) -> str:
    """An error in a few words: the system's error in its chain, else its first line.

    If several ranks failed, the error of the first rank counts.
    """
    if isinstance(error, CheckpointException) and error.failures:
        first_rank = min(error.failures)
        error = error.failures[first_rank][0]
    for link in error_chain(error):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    return first_line(error)
