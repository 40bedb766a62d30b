"""A sharded checkpoint: a folder with a safetensors file from every rank, written at once or in the background.

A file's header has the shape, the dtype and the offset in the whole tensor of each part that the file holds, so it is
read without any pickle. The structure around the tensors (optimizer states, parameter groups) is plain values, kept in
`REST` with a mark where each tensor belongs.
"""

import shutil
import uuid
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.utils._pytree import tree_map, tree_map_with_path

from anlit.checkpoints.integrity import SUMS, UNREADABLE, DamagedError, checksum
from anlit.checkpoints.location import REST, SHARDED
from anlit.checkpoints.writing import (
    PARTIAL,
    first_cause,
    give_name,
    remove_unnamed,
    write_durably,
    write_failed,
)
from anlit.io.write import write_json

MARK = "tensor of the parts: "
STATES = (
    "state_dict",
    "optimizer_states",
)  # the keys of a checkpoint with tensors of which each rank has a part


def without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is put into `tensors` by its path in `value`."""

    def mark(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)
        tensors[name] = leaf
        return MARK + name

    return tree_map_with_path(mark, value)


def with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `without_tensors`. Raises DamagedError if a tensor is missing."""

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, str) or not leaf.startswith(MARK):
            return leaf
        if (name := leaf.removeprefix(MARK)) not in tensors:
            raise DamagedError(f"its parts have no {name}")
        return tensors[name]

    return tree_map(tensor_of, value)


def read_headers(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor. No tensor is larger than its parts together.

    Raises DamagedError for a damaged header, or parts of a tensor that do not fit together.
    """
    files = list(folder.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):  # a pipe would never end
        raise DamagedError("it has no .safetensors file, or one that is no file")
    try:
        headers: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise DamagedError("the header of a .safetensors file cannot be read") from error
    for name, header in headers.items():
        if header.size.numel() != sum(part.sizes.numel() for part in header.chunks):
            raise DamagedError(f"its parts of {name} do not fit together")
    return {name: (header.size, header.properties.dtype) for name, header in headers.items()}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, whole, on the CPU. Raises DamagedError as `read_headers` does."""
    tensors = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in read_headers(folder).items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        read_into(tensors, folder, no_dist=True)
    return tensors


def read_into(tensors: dict[str, Tensor], folder: Path, no_dist: bool = False) -> None:
    """Fill tensors or DTensors, of the latter the rows of this rank. Raises DamagedError on all ranks."""
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=no_dist)
    except CheckpointException as error:
        raise DamagedError(first_cause(error)) from error


class ShardedCheckpoints:
    """Writes each sharded checkpoint into a new folder. A name such as last.ckpt is a link to the newest complete one.

    The link changes only when all ranks have written, so a kill at any moment leaves the previous checkpoint. An error
    on one rank, such as a full disk, is raised on all ranks. `asynchronous` writes in the background, from a copy of
    the state in host memory; `timeout` is the longest wait of a rank for the others and for such a write.
    """

    def __init__(self, asynchronous: bool, timeout: timedelta) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self._group: distributed.ProcessGroup | None = None
        self._pending: tuple[Future, Path] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint `path`: all ranks write their part of the tensors, rank 0 writes the rest.

        In the background: waits for the previous checkpoint, and returns when the state is copied. Raises RunError on
        all ranks if this checkpoint or the previous one could not be written.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        states = without_tensors({key: checkpoint.pop(key, []) for key in STATES}, tensors)
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)
        names = [uuid.uuid4().hex[:12]]
        distributed.broadcast_object_list(names, group=self._group)
        folder = path.parent / SHARDED / f"{path.stem}-{names[0]}"
        self._agree(lambda: _begin(folder, {**checkpoint, **states}), folder, path)
        writer: Any = HuggingFaceStorageWriter(str(folder), save_distributed=True)

        def write(save: Callable[[], Any]) -> None:
            sums = self._agree(lambda: _write_part(save, folder), folder, path)
            self._agree(lambda: _publish(folder, path, dict(ChainMap(*sums))), folder, path)

        if self.asynchronous:
            copied: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            self._pending = ThreadPoolExecutor(1).submit(write, copied.result), path
        else:
            write(lambda: dcp.save(tensors, storage_writer=writer, process_group=self._group))

    def wait(self) -> None:
        """Wait until the checkpoint in the background is complete, or raise RunError on all ranks."""
        if self._pending is not None:
            (pending, path), self._pending = self._pending, None
            try:
                pending.result(self.timeout.total_seconds())
            except TimeoutError as error:
                raise write_failed(path, "a rank has not written its part in time") from error

    def _agree(self, action: Callable[[], Any], folder: Path, path: Path) -> list[Any]:
        """Do something on all ranks; its results. If any has an error, remove the folder and raise on all."""
        result, cause = None, None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # torch's is no `Exception`
            cause = error
        ends: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(
            ends, (result, first_cause(cause) if cause else None), group=self._group
        )
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
    return {
        file.name: checksum(file)
        for file in folder.glob(f"shard-{distributed.get_rank() + 1:05}-*")
    }


def _publish(folder: Path, path: Path, sums: dict[str, Any]) -> None:
    """On rank 0, write the parts' checksums durably and make `path` a link to the complete folder."""
    if distributed.get_rank() == 0:
        write_json(folder / SUMS, sums)
        link = path.with_name(PARTIAL + path.name)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(path.parent), target_is_directory=True)
        give_name(link, path)
