"""The checkpoints of a folder from which a run can go on, the latest step first."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from anlit.checkpoints.integrity import UNREADABLE, reason, verify
from anlit.checkpoints.location import LAST, META, complete_checkpoints
from anlit.errors import UserError


def read_without_shards(path: Path, mmap: bool = True) -> dict[str, Any]:
    """The content of a checkpoint; a sharded checkpoint has marks in place of tensors.

    `with_tensors` replaces these marks.
    """
    file = path / META if path.is_dir() else path
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def step_of(path: Path) -> int:
    """The optimizer steps before a checkpoint was written; −1 if it cannot be read."""
    try:
        return int(read_without_shards(path)["global_step"])
    except UNREADABLE:
        return -1


def has_weights_alone(content: Any) -> bool:
    """Whether a checkpoint was written with `save_weights_only`; no run continues from it."""
    return (
        isinstance(content, dict) and "state_dict" in content and "optimizer_states" not in content
    )


def checkpoints_to_continue(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that a run can continue from, the latest step first.

    The times of the files do not count: a copy may have other times. Checkpoints of weights alone
    and unreadable files are left out.
    """
    steps: dict[Path, int] = {}
    for file in complete_checkpoints(folder):
        with suppress(*UNREADABLE):
            content = read_without_shards(file)
            if not has_weights_alone(content):
                steps[file] = int(content["global_step"])
    return sorted(steps, key=steps.__getitem__, reverse=True)


def name_to_continue(folder: Path) -> str:
    """The --ckpt_path that continues a run from its folder of checkpoints.

    It is `last`. If only other checkpoints exist, it is the path of the latest step.
    """
    if (folder / LAST).exists():
        return "last"
    checkpoints = checkpoints_to_continue(folder)
    return str(checkpoints[0]) if checkpoints else "last"


def damaged_checkpoint(path: Path, error: BaseException) -> UserError:
    """The error for a damaged checkpoint. It names the latest intact checkpoint in the folder."""
    advice = "the run has no other checkpoint, so start again in another --run_dir"
    for checkpoint in checkpoints_to_continue(path.parent):
        with suppress(*UNREADABLE):
            if checkpoint.name != path.name:
                verify(checkpoint)
                advice = f"continue with --ckpt_path {checkpoint}"
                break
    return UserError(f"ckpt_path={path} is damaged ({reason(error)}): {advice}")
