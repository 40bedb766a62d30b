"""Checkpoints on disk, complete or absent: one file, or a folder with a part from every rank."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from anlit.checkpoints.exported import read_exported
from anlit.checkpoints.integrity import TRAINING, UNREADABLE, damaged, require_content, verify
from anlit.checkpoints.location import REST, is_exported, is_sharded, refuse_address
from anlit.checkpoints.sharded import read_tensors, with_tensors
from anlit.checkpoints.writing import (
    PARTIAL,
    first_cause,
    give_name,
    remove_unnamed,
    write_durably,
    write_failed,
)
from anlit.errors import UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints to a temporary file and renames it: a kill while writing keeps the old file.

    It removes only what this process wrote: names of files to remove may come from a checkpoint of somebody else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of one file; raises UserError for an address, RunError if it cannot be written."""
        refuse_address(path)
        self.written.add(str(path))
        target = Path(path)
        partial = target.with_name(PARTIAL + target.name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(checkpoint, partial)
            give_name(partial, target)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            with suppress(OSError):
                partial.unlink(missing_ok=True)  # on a full disk run.json needs the space
            raise write_failed(target, first_cause(error)) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        """A checkpoint of any form in that of one file, tensors and plain values alone; UserError if it is damaged."""
        try:
            return read_checkpoint(
                path, mmap=False
            )  # the optimizer goes on with these tensors when the file is gone
        except UNREADABLE as error:
            raise damaged(Path(path), error) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Of a sharded one the link, and its folder if no other link points to it."""
        if str(path) in self.written:
            Path(path).unlink(missing_ok=True)
            remove_unnamed(Path(path).parent)


def read_checkpoint(path: str | Path, mmap: bool = True) -> dict[str, Any]:
    """A checkpoint of any form, or an exported model, on the CPU, read with weights_only=True.

    Raises one of `UNREADABLE`, also if it has changed since it was written or its parts do not fit together.
    """
    path = Path(path)
    if is_exported(path):
        return read_exported(path)
    verify(path)
    content = read_without_parts(path, mmap)
    if is_sharded(path):
        content = with_tensors(content, read_tensors(path))
        content["optimizer_states"] = [
            by_number(state) for state in content.get("optimizer_states", [])
        ]  # torch's form
    return content


def read_without_parts(path: Path, mmap: bool = True) -> dict[str, Any]:
    """The content of a checkpoint; a sharded one has marks in place of tensors, as `with_tensors` takes them."""
    return torch.load(
        path / REST if path.is_dir() else path, map_location="cpu", weights_only=True, mmap=mmap
    )


def step_of(path: Path) -> int:
    """The optimizer steps after which a checkpoint was written; −1 if it cannot be read."""
    try:
        return int(read_without_parts(path)["global_step"])
    except UNREADABLE:
        return -1


def refuse_damaged(path: Path) -> None:
    """Check the whole checkpoint that a run goes on from, before anything is started or written.

    Raises UserError if it is damaged or has weights alone. The message names another checkpoint, if there is one.
    """
    try:
        verify(path)
        content = read_without_parts(path)
        if not has_weights_alone(content):
            require_content(content, TRAINING)
    except UNREADABLE as error:
        raise damaged(path, error) from error
    if has_weights_alone(content):
        raise UserError(
            f"ckpt_path={path} has weights alone (save_weights_only), and no optimizer's state to continue with: "
            f"begin a run from them with --initial_weights {path}"
        )


def has_weights_alone(content: Any) -> bool:
    """Whether a checkpoint was written with `save_weights_only`, so that no run continues from it."""
    return (
        isinstance(content, dict) and "state_dict" in content and "optimizer_states" not in content
    )


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state in torch's form: parameters by running numbers in the order of the groups, not by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    return rename_parameters(state, {name: number for number, name in enumerate(names)})


def rename_parameters(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other keys for its parameters."""
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {names[key]: entry for key, entry in state.get("state", {}).items()},
        "param_groups": groups,
    }
