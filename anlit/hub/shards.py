"""The safetensors files of a model of transformers, and which tensors are read from each of them.

A folder has model.safetensors, or shards and an index that names the shard of every tensor. The index decides: other
safetensors files in the folder, such as those of an earlier download, are not the model.
"""

from collections import defaultdict
from pathlib import Path

from safetensors import SafetensorError, safe_open

from anlit.checkpoints.location import WEIGHTS
from anlit.config.objects import shown
from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError
from anlit.io.read import read_json

INDEX = f"{WEIGHTS}.index.json"
AGAIN = "download the model again"


def tensors_by_file(folder: Path) -> dict[Path, list[str]]:
    """The names of the model's tensors, by the file that holds them.

    Raises:
        UserError: The folder has no safetensors or two models, the index is damaged or names a file outside the folder,
            a file is missing or damaged, lacks a tensor that the index expects in it, or has that of another file.
    """
    single_file, index = folder / WEIGHTS, folder / INDEX
    if not index.is_file():
        if not single_file.is_file():
            raise UserError(_missing_weights(folder))
        return {single_file: tensor_names(single_file)}
    tensors = _read_index(index)
    if single_file.is_file() and single_file not in tensors:
        raise UserError(
            f"{folder} has {WEIGHTS} and an index of other files, {INDEX}: remove the one that is not the model's"
        )
    _check_shards(tensors, index)
    return tensors


def tensor_names(file: Path) -> list[str]:
    """The names of the tensors in a safetensors file; UserError if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): {AGAIN}") from error


def _missing_weights(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return (
            f"{folder} has neither {WEIGHTS} nor {INDEX}, which names the parts of a model: {AGAIN}"
        )
    return f"{folder} has no {WEIGHTS}: anlit import reads safetensors, with the index of all parts"


def _read_index(index: Path) -> dict[Path, list[str]]:
    record = read_json(index, {"weight_map": {str: str}}, AGAIN)
    if not record.get("weight_map"):
        raise UserError(f"{index} has no weight_map: {AGAIN}")
    tensors = defaultdict(list)
    for name, file in record["weight_map"].items():
        tensors[_inside(index, file)].append(name)
    return dict(tensors)


def _inside(index: Path, file: str) -> Path:
    """The path of a file that the index names; UserError if it is not inside the index's folder."""
    try:
        return index.parent / checked_path(file, str(index))
    except UserError as error:
        raise UserError(
            f"{index} names the file {shown(file)}, which is not inside its folder: {AGAIN}"
        ) from error


def _check_shards(tensors: dict[Path, list[str]], index: Path) -> None:
    file_of = {name: file for file, names in tensors.items() for name in names}
    for file in tensors:
        if not file.is_file():
            raise UserError(f"{index} names {file.name}, which is not there: {AGAIN}")
        names = tensor_names(file)
        for name in names:
            if file_of.get(name, file) != file:
                raise UserError(
                    f"{file} and {file_of[name].name} both hold {name}: {AGAIN}, into an empty folder"
                )
        missing = set(tensors[file]).difference(names)
        if missing:
            raise UserError(
                f"{file} lacks {min(missing)}, which {index.name} expects in it: {AGAIN}"
            )
