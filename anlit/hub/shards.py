"""The safetensors files of a model of transformers, and the tensors that are read from each.

A folder has model.safetensors, or shards and an index that names the shard of every tensor. The
index decides. Other safetensors files in the folder are not the model. They may be files of an
earlier download.
"""

from collections import defaultdict
from pathlib import Path

from safetensors import SafetensorError, safe_open

from anlit.checkpoints.location import WEIGHTS
from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError
from anlit.io.read import read_json

INDEX = f"{WEIGHTS}.index.json"
ADVICE = "download the model again"


def tensors_by_file(folder: Path) -> dict[Path, list[str]]:
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
                f"{folder} has no {WEIGHTS} and no {INDEX}, and anlit import reads safetensors "
                f"only: {ADVICE}"
            )
        return {single_file: tensor_names(single_file)}
    tensors = _read_index(index)
    if single_file.is_file() and single_file not in tensors:
        raise UserError(
            f"{folder} has {WEIGHTS} and an index of other files, {INDEX}: "
            "remove the one that is not the model's"
        )
    _check_shards(tensors, index)
    return tensors


def tensor_names(file: Path) -> list[str]:
    """The names of the tensors in a safetensors file; UserError if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {ADVICE}") from error


def _read_index(index: Path) -> dict[Path, list[str]]:
    record = read_json(index, {"weight_map": {str: str}}, ADVICE)
    if not record.get("weight_map"):
        raise UserError(f"{index} has no weight_map: {ADVICE}")
    tensors = defaultdict(list)
    for name, file in record["weight_map"].items():
        tensors[index.parent / checked_path(file, str(index))].append(name)
    return dict(tensors)


def _check_shards(tensors: dict[Path, list[str]], index: Path) -> None:
    """Raise UserError unless each file has exactly the tensors that the index expects in it."""
    holders: dict[str, Path] = {}
    for file, expected_names in tensors.items():
        if not file.is_file():
            raise UserError(f"{index} names {file.name}, which is not there: {ADVICE}")
        for name in tensor_names(file):
            if name in holders:
                raise UserError(
                    f"{file} and {holders[name].name} both hold {name}: "
                    f"{ADVICE}, into an empty folder"
                )
            holders[name] = file
        missing = [name for name in expected_names if holders.get(name) != file]
        if missing:
            raise UserError(
                f"{file} lacks {min(missing)}, which {index.name} expects in it: {ADVICE}"
            )
