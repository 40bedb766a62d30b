"""Checkpoints on disk, complete or absent: one file, or a folder that every rank wrote its part of."""

import os
import shutil
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import distributed
from torch.distributed import checkpoint as dcp

from anlit.checkpoints.exported import is_exported, read_exported
from anlit.checkpoints.untrusted import check_plain

FOLDERS = ".sharded"
"""Beside the checkpoints: what their names, which are links, stand for."""
REST = "meta.pt"
"""What is not weights or optimizer state, in a folder; Lightning reads it under this name."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their place and renames them: a kill in mid-write leaves the old file whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(".partial-" + target.name)  # "last" must not be the start of its name
        write_durably(checkpoint, partial)
        replaced = _make_way(target)
        os.replace(partial, target)
        _remove_unnamed(replaced)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """One file as it is; a folder of parts put together as if it were one."""
        if is_sharded(path):
            return read_whole(path)
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path) or not Path(path).is_symlink():
            super().remove_checkpoint(path)
            return
        folder = _folder_behind(Path(path))
        Path(path).unlink()
        _remove_unnamed(folder)


def write_durably(content: Any, path: Path) -> None:
    """torch.save, and on the disk when this returns."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def is_sharded(path: str | Path) -> bool:
    """Whether `path` names a checkpoint that every rank wrote its part of."""
    return "://" not in str(path) and Path(path).is_dir() and (Path(path) / REST).is_file()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of any form on the CPU, an exported model too, read with weights_only=True."""
    if is_exported(path):
        return read_exported(path)
    if is_sharded(path):
        return read_whole(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_whole(path: str | Path) -> dict[str, Any]:
    """A sharded checkpoint in the form of a single file: optimizer states by parameter number, as torch has them.

    Raises:
        pickle.UnpicklingError: It holds something else than tensors and plain values.
    """
    check_plain(Path(path))
    content = _load_distributed_checkpoint(Path(path))
    names = sorted(name for name in content if name.startswith("optimizer_"))
    states = [content.pop(f"optimizer_{number}") for number in range(len(names))]
    return {**content, "optimizer_states": [by_number(state) for state in states]}


def read_rest(path: Path) -> dict[str, Any]:
    """What is neither weights nor optimizer state; nothing else is read into memory.

    Raises:
        pickle.UnpicklingError: The checkpoint, also in the parts that are not read here, holds something else than
            tensors and plain values.
    """
    if is_sharded(path):
        check_plain(path)
        return torch.load(path / REST, map_location="cpu", weights_only=True)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}


def by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state in torch's own form, with `names`, which are in the order of the groups, for numbers."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: entry for number, entry in state.get("state", {}).items()}, "param_groups": groups}


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state whose parameters have names, in torch's own form, where they have running numbers.

    A folder keeps no empty state, such as that of SGD without momentum.
    """
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        mine = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": mine})
    return {"state": {numbers[name]: entry for name, entry in state.get("state", {}).items()}, "param_groups": groups}


class ShardedCheckpoints:
    """Writes sharded checkpoints into folders of their own; a name such as last.ckpt is a link to the newest whole one.

    The link changes only when all ranks have written, so a kill at any moment leaves what it named before.

    Args:
        asynchronous: Write in the background, from a copy of the state in host memory.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._started = time.time()
        self._cleaned: set[Path] = set()
        self._group: distributed.ProcessGroup | None = None
        self._pending: Future | None = None

    def save(self, states: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Write on all ranks: `states` of sharded tensors, and `rest` by rank 0, as the checkpoint `path`.

        In the background: waits for the one before, and returns when the state is copied.
        """
        self.wait()
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        names = [uuid.uuid4().hex[:12]]
        distributed.broadcast_object_list(names, group=self._group)
        folder = path.parent / FOLDERS / f"{path.stem}-{names[0]}"
        if distributed.get_rank() == 0:
            self._remove_leftovers(path.parent)
            folder.mkdir(parents=True)
            write_durably(rest, folder / REST)
        distributed.barrier(self._group)
        if not self.asynchronous:
            dcp.save(states, checkpoint_id=folder, process_group=self._group)
            _publish(folder, path)
            distributed.barrier(self._group)
            return
        writing: Any = dcp.async_save(states, checkpoint_id=folder, process_group=self._group)
        self._pending = _published(writing, folder, path)

    def _remove_leftovers(self, folder: Path) -> None:
        """Remove what killed runs left half-written in `folder`: older than this process, and no name stands for it."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        for link in folder.glob(".link-*"):  # to a whole checkpoint that was not named yet
            link.unlink()
        for leftover in (folder / FOLDERS).glob("*"):
            if leftover.stat().st_mtime < self._started:
                _remove_unnamed(leftover)

    def wait(self) -> None:
        """Until what is being written is whole on all ranks.

        Raises:
            Exception: What went wrong in the background.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        distributed.barrier(self._group)


def _published(writing: Future, folder: Path, path: Path) -> Future:
    """Done when `writing` is and the name `path` stands for what was written."""
    published: Future = Future()

    def publish(done: Future) -> None:
        try:
            done.result()
            _publish(folder, path)
            published.set_result(None)
        except Exception as error:  # for whoever waits
            published.set_exception(error)

    writing.add_done_callback(publish)
    return published


def _publish(folder: Path, path: Path) -> None:
    """Let the name `path` stand for `folder`, in one step, and remove what it stood for. Rank 0 does it."""
    if distributed.get_rank() != 0:
        return
    link = path.with_name(".link-" + path.name)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(path.parent), target_is_directory=True)
    replaced = _make_way(path)
    os.replace(link, path)
    _remove_unnamed(replaced)


def _make_way(path: Path) -> Path | None:
    """The folder that the name `path` stands for until it is replaced; None for a file or nothing.

    A copy of a run may have a folder in place of the link. A rename does not replace that, so it is moved.
    """
    if path.is_dir() and not path.is_symlink():
        moved = path.parent / FOLDERS / f"{path.stem}-{uuid.uuid4().hex[:12]}"
        moved.parent.mkdir(exist_ok=True)
        os.replace(path, moved)
        return moved
    return _folder_behind(path)


def _folder_behind(path: Path) -> Path | None:
    """The folder of this run that a link stands for."""
    folder = path.resolve()
    return folder if path.is_symlink() and folder.parent == path.parent.resolve() / FOLDERS else None


def _remove_unnamed(folder: Path | None) -> None:
    """Remove a folder that no link stands for any more."""
    if folder is not None and all(_folder_behind(name) != folder.resolve() for name in folder.parent.parent.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)
