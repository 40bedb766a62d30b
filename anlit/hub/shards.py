"""The safetensors files of a model of transformers, and the tensors that are read from each.

A folder has model.safetensors, or shards and an index that names the shard of every tensor. The
index decides: other safetensors files in the folder, such as files of an earlier download, are
not the model.
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
ADVICE = "download the model again"


def tensors_by_file(folder: Path) -> dict[Path, list[str]]:
    """The names of the model's tensors, by the file that holds them.

    Raises:
        UserError: The folder has no safetensors, or two models. The index is damaged, or names a
            file outside the folder. A file is missing or damaged, or its tensors are not those in
            the index.
    """
    single_file = folder / WEIGHTS
    index = folder / INDEX
    if not index.is_file():
        if not single_file.is_file():
            raise UserError(_missing_weights(folder))
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


def _missing_weights(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return (
            f"{folder} has neither {WEIGHTS} nor {INDEX}, which names the shards of a model: "
            f"{ADVICE}"
        )
    return (
        f"{folder} has no {WEIGHTS}: anlit import reads safetensors, with the index of all shards"
    )


def _read_index(index: Path) -> dict[Path, list[str]]:
    record = read_json(index, {"weight_map": {str: str}}, ADVICE)
    if not record.get("weight_map"):
        raise UserError(f"{index} has no weight_map: {ADVICE}")
    tensors = defaultdict(list)
    for name, file in record["weight_map"].items():
        tensors[_path_in_folder(index, file)].append(name)
    return dict(tensors)


def _path_in_folder(index: Path, file: str) -> Path:
    """The path of a file that the index names; UserError if it leaves the index's folder."""
    try:
        return index.parent / checked_path(file, str(index))
    except UserError as error:
        raise UserError(
            f"{index} names the file {shown(file)}, which is not inside its folder: {ADVICE}"
        ) from error


def _check_shards(tensors: dict[Path, list[str]], index: Path) -> None:
    """Raise UserError unless each file has exactly the tensors that the index expects in it."""
    expected_file = {}
    for file, names in tensors.items():
        expected_file.update(dict.fromkeys(names, file))
    for file in tensors:
        if not file.is_file():
            raise UserError(f"{index} names {file.name}, which is not there: {ADVICE}")
        names = tensor_names(file)
        for name in names:
            if expected_file.get(name, file) != file:
                raise UserError(
                    f"{file} and {expected_file[name].name} both hold {name}: "
                    f"{ADVICE}, into an empty folder"
                )
        missing = set(tensors[file]).difference(names)
        if missing:
            raise UserError(
                f"{file} lacks {min(missing)}, which {index.name} expects in it: {ADVICE}"
            )
