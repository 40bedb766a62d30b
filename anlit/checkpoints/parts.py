"""The tensors of a sharded checkpoint: a safetensors file from every rank, written and read without any pickle.

A file's header has the shape, the dtype and the offset in the whole tensor of each part that the file holds. The
structure around the tensors (optimizer states, parameter groups) is plain values, kept in `REST` with a mark where
each tensor belongs.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.futures import Future

from anlit.checkpoints.integrity import DamagedError, checksum
from anlit.checkpoints.writing import first_cause

SUFFIX = ".safetensors"
LARGEST_HEADER = 2**24
"""In bytes; about 250 are needed for each tensor of a rank."""
OFFSETS, OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of torch's in the header."""
MARK = "tensor of the parts: "


@dataclass(frozen=True)
class Part:
    """The rows of a tensor that one file holds."""

    file: Path
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is put into `tensors` by its path in `value`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return MARK + path
    if isinstance(value, dict):
        return {key: without_tensors(entry, f"{path}.{key}", tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_tensors(entry, f"{path}.{n}", tensors) for n, entry in enumerate(value))
    return value


def with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `without_tensors`.

    Raises:
        DamagedError: A tensor is missing.
    """
    if isinstance(value, str) and value.startswith(MARK):
        if (name := value.removeprefix(MARK)) not in tensors:
            raise DamagedError(f"its parts have no {name}")
        return tensors[name]
    if isinstance(value, dict):
        return {key: with_tensors(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(entry, tensors) for entry in value)
    return value


def read_headers(folder: Path) -> dict[str, list[Part]]:
    """The parts of each tensor, in the order of their rows. No tensor is larger than its parts together.

    Raises:
        DamagedError: A file is damaged, or the parts of a tensor are not all of its rows, each once.
    """
    parts: dict[str, list[Part]] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        _check_header(file)
        try:
            _read_header(file, parts)
        except (SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise DamagedError(f"the header of {file.name} cannot be read") from error
    if not parts:
        raise DamagedError(f"it has no {SUFFIX} file")
    return {name: _in_order(name, pieces) for name, pieces in parts.items()}


def _check_header(file: Path) -> None:
    if not file.is_file():  # a pipe would never end
        raise DamagedError(f"{file.name} is no file")
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > LARGEST_HEADER:
        raise DamagedError(f"the header of {file.name} has {size:,} bytes, more than {LARGEST_HEADER:,}")


def _read_header(file: Path, parts: dict[str, list[Part]]) -> None:
    with safe_open(file, framework="pt") as opened:
        offsets = json.loads(opened.metadata()[OFFSETS])
        for name in opened.keys():  # noqa: SIM118  safe_open is no dict
            shape = tuple(opened.get_slice(name).get_shape())
            first, *others = map(int, offsets[name][OFFSET] or [0])
            if any(others) or first < 0 or len(offsets[name][OFFSET]) != len(shape):
                raise ValueError
            dtype = opened.get_slice(name)[:0].dtype if shape else opened.get_tensor(name).dtype
            parts.setdefault(name, []).append(Part(file, first, shape, dtype))


def _in_order(name: str, parts: list[Part]) -> list[Part]:
    """The parts that have rows, by their first one; a tensor without rows has one part."""
    held = sorted((part for part in parts if not part.shape or part.shape[0]), key=lambda part: part.first_row)
    held = held or parts[:1]
    next_row = 0
    for part in held:
        if part.first_row != next_row or (part.shape[1:], part.dtype) != (held[0].shape[1:], held[0].dtype):
            raise DamagedError(f"its parts of {name} do not fit together")
        next_row += part.shape[0] if part.shape else 1
    if not held[0].shape and len(held) > 1:
        raise DamagedError(f"its parts of {name} do not fit together")
    return held


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, whole, on the CPU.

    Raises:
        DamagedError: As `read_headers`.
    """
    headers = read_headers(folder)
    with ExitStack() as stack:
        files = {part.file for parts in headers.values() for part in parts}
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        return {
            name: torch.cat([opened[part.file].get_tensor(name) for part in parts])
            if parts[0].shape
            else opened[parts[0].file].get_tensor(name)
            for name, parts in headers.items()
        }


def refuse_other_tensors(folder: Path, tensors: Mapping[str, Tensor], complete: bool) -> None:
    """Compare the headers with the tensors that they will be read into.

    Args:
        tensors: By name; whole ones or DTensors.
        complete: Whether the files may have no others.

    Raises:
        DamagedError: A name, shape or dtype differs.
    """
    headers = read_headers(folder)
    for name, tensor in tensors.items():
        if name not in headers:
            raise DamagedError(f"its parts have no {name}")
        parts, shape = headers[name], tuple(tensor.shape)
        stored = (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) if parts[0].shape else ()
        if (stored, parts[0].dtype) != (shape, tensor.dtype):
            raise DamagedError(f"its {name} is {stored}, {parts[0].dtype}, and should be {shape}, {tensor.dtype}")
    if complete and (others := sorted(headers.keys() - tensors.keys())):
        raise DamagedError(f"its parts have {others[0]}, which the model has not")


class PartsWriter(HuggingFaceStorageWriter):
    """torch's writer of a rank's file; rank 0 gets the size and checksum of each file, in `files`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.files: dict[str, dict[str, int]] = {}

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's file and give its checksum to rank 0.

        An error on its way to other ranks loses the one behind it, so its words have the cause.
        """
        try:
            results = super().write_data(*args, **kwargs).wait()
            paths = {result.storage_data.relative_path for result in results}
            sums = {path: checksum(Path(self.path) / path) for path in paths}
        except Exception as error:
            raise RuntimeError(first_cause(error)) from error
        done: Future = Future()
        done.set_result([replace(result, storage_data=sums) for result in results])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """On rank 0, when all ranks have written."""
        for rank in results:
            self.files |= rank[0].storage_data if rank else {}
