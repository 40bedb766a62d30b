"""The safetensors files of a model in a folder, in the form of transformers.

FOLDER/model.safetensors                  all weights; or, of a large model,
FOLDER/model-00001-of-00003.safetensors   shards with a part of the weights each, and
FOLDER/model.safetensors.index.json       the shard of every weight

The index decides. Other safetensors files in the folder are not the model. They may be files of an
earlier download.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anlit.checkpoints.location import INDEX, MAX_SHARD_SIZE, WEIGHTS
from anlit.checkpoints.weights import refuse_non_finite
from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.io.write import replacing, write_json


class WeightFormat(NamedTuple):
    """How files hold weights.

    Args:
        dtype: The dtype of all floating-point weights.
        max_shard_size: Bytes of weights in a file, such as 500MB or 50GB. A larger weight has a
            file of its own.
    """

    dtype: torch.dtype = torch.float32
    max_shard_size: str = MAX_SHARD_SIZE


FLOAT32 = WeightFormat()


def write_weights(folder: Path, weights: dict[str, Tensor], weight_format: WeightFormat) -> None:
    """Write model.safetensors, or shards and their index if the weights exceed a shard.

    No more than one shard is converted at a time. Each file is complete or absent.

    Args:
        folder: A folder that exists.
        weights: Weights of any dtype.
        weight_format: The dtype and size of the files.

    Raises:
        UserError: A weight is NaN, infinite or too large for the dtype.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # not at each start

    dtype, max_shard_size = weight_format
    converted_forms = {name: _converted_form(tensor, dtype) for name, tensor in weights.items()}
    split = split_torch_state_dict_into_shards(converted_forms, max_shard_size=max_shard_size)
    for file_name, names in split.filename_to_tensors.items():
        _write_file(folder / file_name, {name: weights[name] for name in names}, dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index, indent=2)


def _converted_form(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without values, of the shape and dtype that the file will have."""
    file_dtype = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=file_dtype, device="meta")


def _write_file(path: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    refuse_non_finite(weights, "the model")
    converted = {name: convert(name, tensor, dtype) for name, tensor in weights.items()}
    _separate(converted)
    with replacing(path) as partial:
        partial.touch()
        # A new file has the mode of the umask. safetensors would let only the owner read it.
        mode = partial.stat().st_mode
        save_file(converted, partial, metadata={"format": "pt"})
        partial.chmod(mode)


def _separate(weights: dict[str, Tensor]) -> None:
    """Copy weights that share memory, which safetensors refuses.

    A user's architecture may have one block in several layers. A reader expects all its names.
    """
    addresses: set[int] = set()
    for name, tensor in weights.items():
        if tensor.data_ptr() in addresses:
            weights[name] = tensor.clone()
        addresses.add(tensor.data_ptr())


def convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the file's dtype. Raises UserError if it is too large for this dtype."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.contiguous()
    converted = tensor.to(dtype).contiguous()
    largest = max(-tensor.min().item(), tensor.max().item())
    if math.isfinite(largest) and largest > torch.finfo(dtype).max:
        raise UserError(
            f"--dtype {str(dtype).removeprefix('torch.')} cannot hold {name}, which reaches "
            f"{largest:.3g}: choose bfloat16 or float32"
        )
    return converted


def read_weights(folder: Path, advice: str) -> dict[str, Tensor]:
    """Read the weights of a folder, in the dtype of the files.

    The tensors are views of the files. Their values take no memory until they are read.

    Args:
        advice: What the user does about a damaged folder, for the error.

    Raises:
        UserError: As `tensors_by_file`.
    """
    weights: dict[str, Tensor] = {}
    for file, names in tensors_by_file(folder, advice).items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                weights[name] = opened.get_tensor(name)
    return weights


def tensors_by_file(folder: Path, advice: str) -> dict[Path, list[str]]:
    """The names of the model's tensors, by the file that holds them.

    Raises:
        UserError: The folder has no safetensors, or two models. The index is damaged, or names a
            file outside the folder. A file is missing or damaged, or the index names other tensors.
    """
    single_file = folder / WEIGHTS
    index = folder / INDEX
    if not index.is_file():
        if not single_file.is_file():
            raise UserError(
                f"{folder} has no {WEIGHTS} and no {INDEX}, and anlit reads safetensors only: "
                f"{advice}"
            )
        return {single_file: _tensor_names(single_file, advice)}
    tensors = _read_index(index, advice)
    if single_file.is_file() and single_file not in tensors:
        raise UserError(
            f"{folder} has {WEIGHTS} and an index of other files, {INDEX}: "
            "remove the one that is not the model's"
        )
    _check_shards(tensors, index, advice)
    return tensors


def _tensor_names(file: Path, advice: str) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {advice}") from error


def _read_index(index: Path, advice: str) -> dict[Path, list[str]]:
    record = read_json(index, {"weight_map": {str: str}}, advice)
    if not record.get("weight_map"):
        raise UserError(f"{index} has no weight_map: {advice}")
    tensors = defaultdict(list)
    for name, file in record["weight_map"].items():
        tensors[index.parent / checked_path(file, str(index))].append(name)
    return dict(tensors)


def _check_shards(tensors: dict[Path, list[str]], index: Path, advice: str) -> None:
    """Raise UserError unless each file has exactly the tensors that the index expects in it."""
    holders: dict[str, Path] = {}
    for file, expected_names in tensors.items():
        if not file.is_file():
            raise UserError(f"{index} names {file.name}, which is not there: {advice}")
        for name in _tensor_names(file, advice):
            if name in holders:
                raise UserError(
                    f"{file} and {holders[name].name} both hold {name}: "
                    f"{advice}, into an empty folder"
                )
            holders[name] = file
        missing = [name for name in expected_names if holders.get(name) != file]
        if missing:
            raise UserError(
                f"{file} lacks {min(missing)}, which {index.name} expects in it: {advice}"
            )
