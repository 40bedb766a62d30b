"""Writes sharded checkpoints, at once or in the background; all ranks learn of an error on any rank."""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from anlit.checkpoints.integrity import write_sums
from anlit.checkpoints.location import REST, SHARDED, refuse_links
from anlit.checkpoints.parts import PartsWriter, without_tensors
from anlit.checkpoints.writing import (
    first_cause,
    move_folder_away,
    remove_checkpoint,
    remove_if_unlinked,
    write_durably,
    write_failed,
)

STATES = ("state_dict", "optimizer_states")
"""The keys of a checkpoint with tensors of which each rank has a part."""


class ShardedCheckpoints:
    """Writes each sharded checkpoint into a new folder. A name such as last.ckpt is a link to the newest complete one.

    The link changes only when all ranks have written, so a kill at any moment leaves the previous checkpoint. An error
    on one rank, such as a full disk, is raised on all ranks. No wait is longer than `timeout`, so a write must not take
    longer either.

    Args:
        asynchronous: Write in the background, from a copy of the state in host memory.
        timeout: The longest wait of a rank for the others and for a write in the background.
    """

    def __init__(self, asynchronous: bool, timeout: timedelta) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self._started = time.time()
        self._cleaned: set[Path] = set()
        self._written: set[Path] = set()
        self._group: distributed.ProcessGroup | None = None
        self._pending: tuple[Future[None], Path, Path] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint `path`: all ranks write their part of the tensors, rank 0 writes the rest.

        In the background: waits for the previous checkpoint, and returns when the state is copied.

        Raises:
            RunError: On all ranks, if this checkpoint or the previous one could not be written.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        states = {key: without_tensors(checkpoint.pop(key, []), key, tensors) for key in STATES}
        rest = {**checkpoint, **states}
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)
        names = [uuid.uuid4().hex[:12]]
        distributed.broadcast_object_list(names, group=self._group)
        folder = path.parent / SHARDED / f"{path.stem}-{names[0]}"
        self._agree(_error_of(lambda: self._prepare(folder, rest)), folder, path)
        self._written.add(path)
        writer = PartsWriter(folder)
        if self.asynchronous:
            writing: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            self._pending = _published(writing, writer, path), folder, path
            return

        def write() -> None:
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            _publish(writer, path)

        self._agree(_error_of(write), folder, path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint that this process wrote, and no other: the path may come from somebody's checkpoint."""
        if path in self._written:
            remove_checkpoint(path)

    def _prepare(self, folder: Path, rest: dict[str, Any]) -> None:
        if distributed.get_rank() == 0:
            refuse_links(folder.parent.parent)
            self._remove_leftovers(folder.parent.parent)
            folder.mkdir(parents=True)
            write_durably(rest, folder / REST)

    def _agree(self, error: BaseException | None, folder: Path, path: Path) -> None:
        """Wait for all ranks. If any has an error, remove the folder and raise on all."""
        reasons: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(reasons, None if error is None else first_cause(error), group=self._group)
        if not any(reasons):
            return
        if distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise write_failed(path, next(filter(None, reasons))) from error

    def _remove_leftovers(self, folder: Path) -> None:
        """Remove incomplete checkpoints of killed runs: older than this process, and no link points to them."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        for link in folder.glob(".link-*"):  # to a complete checkpoint that had no name yet
            link.unlink()
        for leftover in (folder / SHARDED).glob("*"):
            if leftover.stat().st_mtime < self._started:
                remove_if_unlinked(leftover)

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete on all ranks.

        Raises:
            RunError: On all ranks, if it could not be written.
        """
        if self._pending is not None:
            (pending, folder, path), self._pending = self._pending, None
            self._agree(_error_of(lambda: pending.result(self.timeout.total_seconds())), folder, path)

    def abandon(self) -> None:
        """Wait for this rank's write and ignore its errors: the run has failed, and other ranks may be gone."""
        if self._pending is not None:
            (pending, *_), self._pending = self._pending, None
            _error_of(lambda: pending.result(self.timeout.total_seconds()))


def _error_of(action: Callable[[], Any]) -> BaseException | None:
    """The error of an action, for the other ranks. torch's CheckpointException is not an `Exception`."""
    try:
        action()
    except (Exception, CheckpointException) as error:
        return error
    return None


def _published(writing: Future, writer: PartsWriter, path: Path) -> Future[None]:
    """A future that is done when `writing` is done and `path` links to the result."""
    published: Future[None] = Future()

    def publish(done: Future) -> None:
        error = _error_of(done.result) or _error_of(lambda: _publish(writer, path))
        if error is None:
            published.set_result(None)
        else:
            published.set_exception(error)

    writing.add_done_callback(publish)
    return published


def _publish(writer: PartsWriter, path: Path) -> None:
    """On rank 0, make `path` a link to the complete folder, atomically, and remove the folder that it linked to."""
    if distributed.get_rank() != 0:
        return
    folder = Path(writer.path)
    write_sums(folder, writer.files)
    link = path.with_name(".link-" + path.name)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.relative_to(path.parent), target_is_directory=True)
    replaced = move_folder_away(path)
    os.replace(link, path)
    remove_if_unlinked(replaced)
