"""Checkpoints on disk, complete or absent: one file, or a folder with a part from every rank."""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from anlit.checkpoints.exported import is_exported, read_exported
from anlit.checkpoints.integrity import DamagedError, next_best, verify
from anlit.checkpoints.untrusted import check_plain
from anlit.errors import RunError, UserError
from anlit.lightning_internals import read_distributed_checkpoint

FOLDERS = ".sharded"
"""The folder next to the checkpoints that holds sharded ones; the names of checkpoints are links into it."""
REST = "meta.pt"
"""In a sharded checkpoint, the file of all that is not weights or optimizer state. Lightning uses this name."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints to a temporary file and renames it: a kill while writing keeps the old file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(".partial-" + target.name)  # "last" must not be the start of its name
        try:
            write_durably(checkpoint, partial)
            replaced = make_way(target)
            os.replace(partial, target)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            partial.unlink(missing_ok=True)  # on a full disk run.json needs the space
            raise write_failed(target, reason_of(error)) from error
        remove_unnamed(replaced)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """A checkpoint of one file or of parts, in the form of one file. Only tensors and plain values are read.

        Raises:
            UserError: `path` is an address, or the checkpoint is damaged.
        """
        refuse_address(path)
        try:
            verify(Path(path))
        except DamagedError as error:
            raise UserError(f"ckpt_path={path} is damaged ({error}): {next_best(Path(path))}") from error
        if is_sharded(path):
            return read_whole(path)
        return super().load_checkpoint(path, map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path) or not Path(path).is_symlink():
            super().remove_checkpoint(path)
            return
        folder = _folder_behind(Path(path))
        Path(path).unlink()
        remove_unnamed(folder)


def refuse_address(path: str | Path) -> None:
    """Raise UserError for a checkpoint that is not on a file system of this machine."""
    if "://" in str(path) or str(path).startswith("registry"):
        raise UserError(
            f"the checkpoint {path} is not on this machine: download it, and give the path of the file or folder"
        )


def write_durably(content: Any, path: Path) -> None:
    """torch.save, followed by fsync."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def write_failed(path: Path, reason: str) -> RunError:
    """The error that ends a run that cannot save."""
    last = path.with_name("last.ckpt")
    advice = f"{last} is complete, continue with --ckpt_path last" if last.exists() else "start the run again"
    return RunError(f"{path} could not be written ({reason}): make room or repair the disk; then {advice}")


def reason_of(error: BaseException) -> str:
    """The cause of an error in a few words: the operating system's error in the chain, or that of the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(inner)}"
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        link = link.__cause__ or link.__context__
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is a checkpoint with a part from every rank."""
    return "://" not in str(path) and Path(path).is_dir() and (Path(path) / REST).is_file()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of any form, or an exported model, on the CPU, read with weights_only=True.

    Raises:
        DamagedError: It has changed since it was written.
    """
    if is_exported(path):
        return read_exported(path)
    verify(Path(path))
    if is_sharded(path):
        return read_whole(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_whole(path: str | Path) -> dict[str, Any]:
    """A sharded checkpoint in the form of a single file: optimizer states by parameter number, as torch has them.

    Raises:
        pickle.UnpicklingError: It holds objects other than tensors and plain values.
    """
    check_plain(Path(path))
    content = read_distributed_checkpoint(Path(path))
    names = sorted(name for name in content if name.startswith("optimizer_"))
    states = [content.pop(f"optimizer_{number}") for number in range(len(names))]
    return {**content, "optimizer_states": [by_number(state) for state in states]}


def read_rest(path: Path) -> dict[str, Any]:
    """The content of a checkpoint without weights and optimizer state, which are not read into memory.

    Raises:
        pickle.UnpicklingError: The checkpoint holds objects other than tensors and plain values, also in parts that
            are not read here.
    """
    if is_sharded(path):
        check_plain(path)
        return torch.load(path / REST, map_location="cpu", weights_only=True)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state in torch's form, with parameter numbers replaced by `names`, in the order of the groups."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: entry for number, entry in state.get("state", {}).items()}, "param_groups": groups}


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `by_name`: parameter names replaced by running numbers.

    A sharded checkpoint has no entry for an empty state, such as that of SGD without momentum.
    """
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        indices = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": indices})
    return {"state": {numbers[name]: entry for name, entry in state.get("state", {}).items()}, "param_groups": groups}


def make_way(path: Path) -> Path | None:
    """Prepare for a rename to `path`; returns the folder that `path` links to, None for a file or nothing.

    A copy of a run may have a folder instead of the link. A rename cannot replace a folder, so it is moved away.
    """
    if path.is_dir() and not path.is_symlink():
        moved = path.parent / FOLDERS / f"{path.stem}-{uuid.uuid4().hex[:12]}"
        moved.parent.mkdir(exist_ok=True)
        os.replace(path, moved)
        return moved
    return _folder_behind(path)


def _folder_behind(path: Path) -> Path | None:
    """The folder of this run that a link points to, None for anything else."""
    folder = path.resolve()
    return folder if path.is_symlink() and folder.parent == path.parent.resolve() / FOLDERS else None


def remove_unnamed(folder: Path | None) -> None:
    """Remove a sharded checkpoint's folder unless a link points to it."""
    if folder is not None and all(_folder_behind(name) != folder.resolve() for name in folder.parent.parent.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)
