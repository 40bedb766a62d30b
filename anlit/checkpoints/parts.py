"""The tensors of a sharded checkpoint: a safetensors file from every rank, read without any pickle.

A file's header has the shape, the dtype and the offset in the whole tensor of each part that the file holds. The
structure around the tensors (optimizer states, parameter groups) is plain values, kept in `REST` with a mark where
each tensor belongs.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils._pytree import tree_map, tree_map_with_path

from anlit.checkpoints.integrity import UNREADABLE, DamagedError
from anlit.checkpoints.writing import first_cause

MARK = "tensor of the parts: "


def without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is put into `tensors` by its path in `value`."""

    def mark(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = ".".join([path, *(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)])
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
    if not files:
        raise DamagedError("it has no .safetensors file")
    if others := [file.name for file in files if not file.is_file()]:  # a pipe would never end
        raise DamagedError(f"{others[0]} is no file")
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
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in read_headers(folder).items()}
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


def refuse_other_tensors(folder: Path, tensors: Mapping[str, Tensor], complete: bool) -> None:
    """Raises DamagedError if the headers differ in a name, shape or dtype from what they will be read into.

    Args:
        tensors: Whole ones or DTensors, by name.
        complete: Whether the files may have no others.
    """
    headers = read_headers(folder)
    for name, tensor in tensors.items():
        if headers.get(name) != (tensor.shape, tensor.dtype):
            raise DamagedError(f"its parts have no {name} of {tuple(tensor.shape)}, {tensor.dtype}")
    if complete and (others := sorted(headers.keys() - tensors.keys())):
        raise DamagedError(f"its parts have {others[0]}, which the model has not")
