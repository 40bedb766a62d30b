"""A sharded checkpoint: a folder with a safetensors file, a shard, from every rank.

A shard holds a part of each tensor. Its header has the part's shape, dtype and offset in the whole
tensor. So a shard is read without pickle. `META` holds the structure around the tensors: optimizer
states and parameter groups. It is plain values, with a mark in place of each tensor.
"""

import shutil
import uuid
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
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

from anlit.checkpoints.averages import CURRENT
from anlit.checkpoints.integrity import SUMS, UNREADABLE, DamagedError, checksum
from anlit.checkpoints.location import META, SHARDED
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
"""The start of a mark, which continues with the name of the tensor."""
WEIGHTS = ("state_dict", CURRENT)
"""The keys of a checkpoint with weights by name. Only averages of weights need the second."""
STATES = ("state_dict", "optimizer_states", CURRENT)
"""The keys of a checkpoint with sharded tensors."""


def without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` with a mark in place of each tensor; puts the tensors into `tensors`, by path."""

    def mark(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = ".".join(map(_key_as_text, keys))
        tensors[name] = leaf
        return MARK + name

    return tree_map_with_path(mark, value)


def _key_as_text(key: Any) -> str:
    """A key of torch's trees: of a dictionary, or the index in a list."""
    return str(getattr(key, "key", getattr(key, "idx", "")))


def with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `without_tensors`. Raises DamagedError if a tensor is missing."""

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, str) or not leaf.startswith(MARK):
            return leaf
        name = leaf.removeprefix(MARK)
        if name not in tensors:
            raise DamagedError(f"its shards have no {name}")
        return tensors[name]

    return tree_map(tensor_of, value)


def read_headers(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor; no tensor is larger than its parts together.

    Raises DamagedError for a damaged header, or parts that do not fit together.
    """
    files = list(folder.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):  # a pipe would never end
        raise DamagedError("it has no .safetensors file, or a folder or pipe in its place")
    try:
        headers: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise DamagedError("the header of a .safetensors file cannot be read") from error
    for name, header in headers.items():
        n_entries = sum(chunk.sizes.numel() for chunk in header.chunks)
        if header.size.numel() != n_entries:
            raise DamagedError(f"its shards of {name} do not fit together")
    return {name: (header.size, header.properties.dtype) for name, header in headers.items()}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, whole, on the CPU. Raises DamagedError like `read_headers`."""
    tensors = {}
    for name, (shape, dtype) in read_headers(folder).items():
        tensors[name] = torch.zeros(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        read_into(tensors, folder, no_dist=True)
    return tensors


def read_into(tensors: dict[str, Tensor], folder: Path, no_dist: bool = False) -> None:
    """Fill tensors, or this rank's rows of DTensors. Raises DamagedError on all ranks."""
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=no_dist)
    except CheckpointException as error:
        raise DamagedError(first_cause(error)) from error


class ShardedCheckpoints:
    """Writes each sharded checkpoint into a new folder. Its name is a link to the folder.

    The link changes only when all ranks have written. So a kill at any moment leaves the previous
    checkpoint. An error of one rank, such as a full disk, is raised on all ranks.

    Args:
        asynchronous: Write in the background, from a copy of the state in host memory.
        timeout: The longest wait for other ranks, and for a checkpoint in the background.
    """

    def __init__(self, asynchronous: bool, timeout: timedelta) -> None:
        self.asynchronous = asynchronous
        self.timeout = timeout
        self._group: distributed.ProcessGroup | None = None
        self._pending: tuple[Future, Path] | None = None

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint `path`: all ranks write their shard, rank 0 writes the structure.

        In the background, this waits for the previous checkpoint. It returns when the state is
        copied. Raises RunError on all ranks if this or the previous checkpoint could not be
        written.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        states = {key: checkpoint.pop(key) for key in STATES if key in checkpoint}
        structure = {**checkpoint, **without_tensors(states, tensors)}
        folder = path.parent / SHARDED / f"{path.stem}-{self._make_suffix()}"
        self._agree(partial(_begin, folder, structure), folder, path)
        writer: Any = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        if self.asynchronous:
            copied: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            executor = ThreadPoolExecutor(1)
            self._pending = executor.submit(self._write, copied.result, folder, path), path
        else:
            save = partial(dcp.save, tensors, storage_writer=writer, process_group=self._group)
            self._write(save, folder, path)

    def _make_suffix(self) -> str:
        """A random suffix of a folder, equal on all ranks. The first call connects the ranks."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)
        suffixes = [uuid.uuid4().hex[:12]]
        distributed.broadcast_object_list(suffixes, group=self._group)
        return suffixes[0]

    def _write(self, save: Callable[[], Any], folder: Path, path: Path) -> None:
        """Write this rank's shard by `save`; if all ranks have written, publish the checkpoint."""
        checksums = self._agree(partial(_write_shard, save, folder), folder, path)
        self._agree(partial(_publish, folder, path, dict(ChainMap(*checksums))), folder, path)

    def wait(self) -> None:
        """Wait for the checkpoint in the background; if it failed, all ranks raise RunError."""
        if self._pending is None:
            return
        pending, path = self._pending
        self._pending = None
        try:
            pending.result(self.timeout.total_seconds())
        except TimeoutError as error:
            raise write_failed(path, "a rank has not written its shard in time") from error

    def _agree(self, action: Callable[[], Any], folder: Path, path: Path) -> list[Any]:
        """Run `action` on all ranks and return all results.

        If it fails on a rank, the folder is removed. All ranks raise RunError.
        """
        result = None
        cause = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # torch's is no `Exception`
            cause = error
        reason = first_cause(cause) if cause else None
        outcomes: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(outcomes, (result, reason), group=self._group)
        reasons = [reason for _, reason in outcomes if reason is not None]
        if reasons:
            if distributed.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise write_failed(path, reasons[0]) from cause
        return [result for result, _ in outcomes]


def _begin(folder: Path, structure: dict[str, Any]) -> None:
    """On rank 0, make the folder and write the structure around the tensors."""
    if distributed.get_rank() == 0:
        remove_unnamed(folder.parent.parent)  # a killed run may have left some
        folder.mkdir(parents=True)
        write_durably(structure, folder / META)


def _write_shard(save: Callable[[], Any], folder: Path) -> dict[str, dict[str, int]]:
    """Write this rank's files and return their checksums; torch puts the rank into their names."""
    save()
    files = folder.glob(f"shard-{distributed.get_rank() + 1:05}-*")
    return {file.name: checksum(file) for file in files}


def _publish(folder: Path, path: Path, checksums: dict[str, Any]) -> None:
    """On rank 0, write the checksums durably and make `path` a link to the complete folder."""
    if distributed.get_rank() == 0:
        write_json(folder / SUMS, checksums)
        link = path.with_name(PARTIAL + path.name)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(path.parent), target_is_directory=True)
        give_name(link, path)
