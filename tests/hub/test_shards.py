"""The index of a sharded checkpoint decides which files are the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit.training.load_model import load_checkpoint
from tests.hub.models import import_model
from tests.hub.published import published
from tests.nn.models.tiny import random_tokens

TOKENS = random_tokens(3, 24)
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder with several shards, and the logits of its model."""
    folder = tmp_path_factory.mktemp("published") / "qwen3"
    model = published("Qwen3-0.6B", folder)
    return folder, model(TOKENS).logits.detach()


@pytest.fixture
def sharded(whole: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    folder, _ = whole
    return Path(shutil.copytree(folder, tmp_path / "source"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index."""
    record: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return record["weight_map"]


def imported_logits(folder: Path, output: Path) -> torch.Tensor:
    """The logits of the model that `anlit import` writes."""
    imported_folder = import_model(folder, output)
    return load_checkpoint(str(imported_folder), "cpu").model(TOKENS)


def test_shards_of_an_earlier_download_are_not_read(whole, sharded: Path, tmp_path: Path) -> None:
    """Their names sort after the names in the index, so a merge would take their tensors."""
    for number, file in enumerate(shards(sharded), 1):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor += 1
        save_file(tensors, sharded / f"model-{number:05}-of-99999.safetensors")

    logits = imported_logits(sharded, tmp_path / "ours")

    _, expected = whole
    torch.testing.assert_close(logits, expected)


def test_the_index_may_name_its_files_as_it_likes(whole, sharded: Path, tmp_path: Path) -> None:
    index = (sharded / INDEX).read_text()
    for number, file in enumerate(shards(sharded)):
        new_name = f"part_{number}.safetensors"
        file.rename(sharded / new_name)
        index = index.replace(file.name, new_name)
    (sharded / INDEX).write_text(index)

    logits = imported_logits(sharded, tmp_path / "ours")

    _, expected = whole
    torch.testing.assert_close(logits, expected)


def hold_twice(folder: Path) -> None:
    """Two listed files hold the embedding."""
    owner = weight_map(folder)[EMBEDDING]
    other = next(file for file in shards(folder) if file.name != owner)
    embedding = torch.zeros(29, 48)
    save_file(load_file(other) | {EMBEDDING: embedding}, other)


def lose_a_tensor(folder: Path) -> None:
    owner = folder / weight_map(folder)[EMBEDDING]
    tensors = load_file(owner)
    del tensors[EMBEDDING]
    save_file(tensors, owner)


def hold_in_a_namesake(folder: Path) -> None:
    """The embedding is in a file of the same name in another folder, which is read first."""
    files = weight_map(folder)
    owner = folder / files.pop(EMBEDDING)
    namesake = folder / "a" / owner.name
    namesake.parent.mkdir()
    embedding = load_file(owner)[EMBEDDING]
    save_file({EMBEDDING: embedding, "a.weight": torch.zeros(1)}, namesake)
    lose_a_tensor(folder)
    files = {"a.weight": f"a/{owner.name}", EMBEDDING: owner.name, **files}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def add_second_model(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def lose_index(folder: Path) -> None:
    (folder / INDEX).unlink()


CHANGED_FOLDERS = {
    hold_twice: f"both hold {EMBEDDING}: download the model again, into an empty folder",
    lose_a_tensor: f"lacks {EMBEDDING}, which {INDEX} expects in it",
    hold_in_a_namesake: f"lacks {EMBEDDING}, which {INDEX} expects in it",
    lose_index: f"has no model.safetensors and no {INDEX}",
    add_second_model: "model.safetensors and an index of other files",
}
"""A change of the folder, and a part of the error."""
CHANGED_NAMES = {
    "../source/model.safetensors": "which is not inside its folder",
    "/etc/passwd": "which is not inside its folder",
    "none.safetensors": "names none.safetensors, which is not there",
    "config.json": "config.json cannot be read",
}
"""A file that the index names for the embedding, and a part of the error."""
CHANGED_INDEX = {
    "{": f"{INDEX} cannot be read",
    "{}": f"{INDEX} has no weight_map",
    '{"weight_map": []}': "weight_map is list in place of dict",
    '{"weight_map": {"a": 3}}': "weight_map.a is int in place of str",
}
"""The content of the index, and a part of the error."""


@pytest.fixture
def refused_import(sharded: Path, refusal) -> Callable[[], str]:
    """refused_import() → the error of `anlit import`, which writes nothing."""

    def run() -> str:
        output = sharded.parent / "ours"
        sentence = refusal("import", sharded, "--output", output)
        assert not output.exists()
        return sentence

    return run


@pytest.mark.parametrize("spoil", CHANGED_FOLDERS)
def test_a_folder_that_does_not_fit_the_index_is_refused(
    spoil: Callable[[Path], None], sharded: Path, refused_import
) -> None:
    spoil(sharded)

    assert CHANGED_FOLDERS[spoil] in refused_import()


@pytest.mark.parametrize("name", CHANGED_NAMES)
def test_an_index_that_names_another_file_is_refused(
    name: str, sharded: Path, refused_import
) -> None:
    files = weight_map(sharded) | {EMBEDDING: name}
    (sharded / INDEX).write_text(json.dumps({"weight_map": files}))

    sentence = refused_import()

    assert CHANGED_NAMES[name] in sentence
    assert name in sentence


@pytest.mark.parametrize("content", CHANGED_INDEX)
def test_a_damaged_index_is_refused(content: str, sharded: Path, refused_import) -> None:
    (sharded / INDEX).write_text(content)

    assert CHANGED_INDEX[content] in refused_import()
