"""Writes sharded checkpoints, at once or in the background; all ranks learn of an error on any rank."""

import json
import os
import shutil
import uuid
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from anlit.checkpoints.integrity import SUMS, checksum
from anlit.checkpoints.location import REST, SHARDED
from anlit.checkpoints.parts import without_tensors
from anlit.checkpoints.writing import (
    PARTIAL,
    first_cause,
    give_name,
    remove_checkpoint,
    remove_unnamed,
    write_durably,
    write_failed,
)

STATES = ("state_dict", "optimizer_states")
"""The keys of a checkpoint with tensors of which each rank has a part."""


class ShardedCheckpoints:
    """Writes each sharded checkpoint into a new folder. A name such as last.ckpt is a link to the newest complete one.

    The link changes only when all ranks have written, so a kill at any moment leaves the previous checkpoint. An error
    on one rank, such as a full disk, is raised on all ranks.

    Args:
        asynchronous: Write in the background, from a copy of the state in host memory.
        timeout: The longest wait of a rank for the others and for a write in the background.
    """

    def __init__(self, asynchronous: bool, timeout: timedelta) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self._written: set[Path] = set()
        self._group: distributed.ProcessGroup | None = None
        self._pending: tuple[Future, Path] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint `path`: all ranks write their part of the tensors, rank 0 writes the rest.

        In the background: waits for the previous checkpoint, and returns when the state is copied.

        Raises:
            RunError: On all ranks, if this checkpoint or the previous one could not be written.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        states = {key: without_tensors(checkpoint.pop(key, []), key, tensors) for key in STATES}
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)
        names = [uuid.uuid4().hex[:12]]
        distributed.broadcast_object_list(names, group=self._group)
        folder = path.parent / SHARDED / f"{path.stem}-{names[0]}"
        self._agree(lambda: _begin(folder, {**checkpoint, **states}), folder, path)
        self._written.add(path)
        settings: Any = {
            "storage_writer": HuggingFaceStorageWriter(str(folder), save_distributed=True),
            "process_group": self._group,
        }

        def write(save: Callable[[], Any]) -> None:
            sums = self._agree(lambda: _write_part(save, folder), folder, path)
            self._agree(lambda: _publish(folder, path, dict(ChainMap(*sums))), folder, path)

        if self.asynchronous:
            copied: Any = dcp.async_save(tensors, **settings)
            self._pending = ThreadPoolExecutor(1).submit(write, copied.result), path
        else:
            write(lambda: dcp.save(tensors, **settings))

    def remove(self, path: Path) -> None:
        """Remove a checkpoint that this process wrote, and no other: the path may come from somebody's checkpoint."""
        if path in self._written:
            remove_checkpoint(path)

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete, or raise RunError on all ranks."""
        if self._pending is not None:
            (pending, path), self._pending = self._pending, None
            try:
                pending.result(self.timeout.total_seconds())
            except TimeoutError as error:
                raise write_failed(path, "a rank has not written its part in time") from error

    def abandon(self) -> None:
        """Wait for this rank's write and ignore its errors: the run has failed, and other ranks may be gone."""
        with suppress(Exception):
            self.wait()

    def _agree(self, action: Callable[[], Any], folder: Path, path: Path) -> list[Any]:
        """Do something on all ranks; its results. If any has an error, remove the folder and raise on all."""
        result, cause = None, None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # torch's is no `Exception`
            cause = error
        ends: list[Any] = [None] * distributed.get_world_size(self._group)
        own = (result, None if cause is None else first_cause(cause))
        distributed.all_gather_object(ends, own, group=self._group)
        if reasons := [reason for _, reason in ends if reason is not None]:
            if distributed.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise write_failed(path, reasons[0]) from cause
        return [result for result, _ in ends]


def _begin(folder: Path, rest: dict[str, Any]) -> None:
    """On rank 0, make the folder with all that is not a tensor."""
    if distributed.get_rank() == 0:
        remove_unnamed(folder.parent.parent)  # a killed run may have left some
        folder.mkdir(parents=True)
        write_durably(rest, folder / REST)


def _write_part(save: Callable[[], Any], folder: Path) -> dict[str, dict[str, int]]:
    """Write this rank's files; returns their checksums. torch has the number of the rank in their names."""
    save()
    return {file.name: checksum(file) for file in folder.glob(f"shard-{distributed.get_rank() + 1:05}-*")}


def _publish(folder: Path, path: Path, sums: dict[str, Any]) -> None:
    """On rank 0, write the parts' checksums durably and make `path` a link to the complete folder."""
    if distributed.get_rank() == 0:
        with (folder / SUMS).open("x") as file:
            json.dump(sums, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        link = path.with_name(PARTIAL + path.name)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(path.parent), target_is_directory=True)
        give_name(link, path)
