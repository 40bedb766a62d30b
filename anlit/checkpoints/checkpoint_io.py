"""Checkpoints on disk, complete or absent: one file, or a folder with a part from every rank."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from anlit.checkpoints.exported import read_exported
from anlit.checkpoints.integrity import UNREADABLE, DamagedError, next_best, unreadable, verify
from anlit.checkpoints.location import REST, is_exported, is_sharded, refuse_address, refuse_links
from anlit.checkpoints.parts import read_tensors, with_tensors
from anlit.checkpoints.writing import (
    PARTIAL,
    first_cause,
    move_folder_away,
    remove_checkpoint,
    remove_if_unlinked,
    write_durably,
    write_failed,
)
from anlit.errors import UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints to a temporary file and renames it: a kill while writing keeps the old file.

    It removes only what this process wrote: names of files to remove may come from a checkpoint of somebody else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            self.written.add(str(path))
            return
        target = Path(path)
        refuse_links(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(PARTIAL + target.name)
        try:
            write_durably(checkpoint, partial)
            replaced = move_folder_away(target)
            os.replace(partial, target)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            partial.unlink(missing_ok=True)  # on a full disk run.json needs the space
            raise write_failed(target, first_cause(error)) from error
        self.written.add(str(path))
        remove_if_unlinked(replaced)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """A checkpoint of one file or of parts, in the form of one file. Only tensors and plain values are read.

        Raises:
            UserError: `path` is an address, or the checkpoint is damaged.
        """
        refuse_address(path)
        try:
            verify(Path(path))
            if is_sharded(path):
                return read_whole(Path(path))
            return super().load_checkpoint(path, map_location, weights_only=True)
        except DamagedError as error:
            raise UserError(f"ckpt_path={path} is damaged ({error}): {next_best(Path(path))}") from error
        except UNREADABLE as error:
            raise unreadable(path, error) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        if str(path) not in self.written:
            return
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            remove_checkpoint(Path(path))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of any form, or an exported model, on the CPU, read with weights_only=True.

    Raises:
        DamagedError: It has changed since it was written.
    """
    if is_exported(path):
        return read_exported(path)
    verify(Path(path))
    if is_sharded(path):
        return read_whole(Path(path))
    return _read_file(Path(path))


def read_whole(folder: Path) -> dict[str, Any]:
    """A sharded checkpoint in the form of a single file: optimizer states by parameter number, as torch has them.

    Raises:
        DamagedError: Its parts do not fit together.
    """
    content = with_tensors(_read_rest(folder), read_tensors(folder))
    return {**content, "optimizer_states": [by_number(state) for state in content["optimizer_states"]]}


def read_rest(path: Path) -> dict[str, Any]:
    """The content of a checkpoint without weights, which are not read into memory.

    The optimizer states of a sharded one have marks in place of tensors, as `with_tensors` takes them.
    """
    content = _read_rest(path) if is_sharded(path) else _read_file(path)
    return {key: value for key, value in content.items() if key != "state_dict"}


def _read_file(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _read_rest(folder: Path) -> dict[str, Any]:
    return torch.load(folder / REST, map_location="cpu", weights_only=True)


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state in torch's form, with parameter numbers replaced by `names`, in the order of the groups."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: entry for number, entry in state.get("state", {}).items()}, "param_groups": groups}


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `by_name`: parameter names replaced by running numbers."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        indices = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": indices})
    return {"state": {numbers[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}
