"""The index of a sharded checkpoint decides which files are the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit.cli import main
from anlit.training.load_model import load_checkpoint
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
    return Path(shutil.copytree(whole[0], tmp_path / "source"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((folder / INDEX).read_text())
    change(record)
    (folder / INDEX).write_text(json.dumps(record))


def imported_logits(folder: Path, output: Path) -> torch.Tensor:
    assert main(["import", str(folder), "--output", str(output)]) == 0
    return load_checkpoint(str(output), "cpu").model(TOKENS)


def test_shards_of_an_earlier_download_are_not_read(whole, sharded: Path, tmp_path: Path) -> None:
    """Their names sort after those of the index, so a merge would take their tensors."""
    for number, file in enumerate(shards(sharded), 1):
        older = {name: tensor + 1 for name, tensor in load_file(file).items()}
        save_file(older, sharded / f"model-{number:05}-of-99999.safetensors")
    torch.testing.assert_close(imported_logits(sharded, tmp_path / "ours"), whole[1])


def test_the_index_may_name_its_files_as_it_likes(whole, sharded: Path, tmp_path: Path) -> None:
    names = {file.name: f"part_{n}.safetensors" for n, file in enumerate(shards(sharded))}
    for old, new in names.items():
        (sharded / old).rename(sharded / new)
    edit_index(
        sharded,
        lambda record: record.update(
            weight_map={name: names[file] for name, file in record["weight_map"].items()}
        ),
    )
    torch.testing.assert_close(imported_logits(sharded, tmp_path / "ours"), whole[1])


def hold_twice(folder: Path) -> None:
    """Two listed files hold the embedding."""
    (owner,) = {json.loads((folder / INDEX).read_text())["weight_map"][EMBEDDING]}
    other = next(file for file in shards(folder) if file.name != owner)
    save_file(load_file(other) | {EMBEDDING: torch.zeros(29, 48)}, other)


def lose_a_tensor(folder: Path) -> None:
    owner = folder / json.loads((folder / INDEX).read_text())["weight_map"][EMBEDDING]
    tensors = load_file(owner)
    del tensors[EMBEDDING]
    save_file(tensors, owner)


def rename_shard(new: str) -> Callable[[Path], None]:
    """The index says that the embedding is in the file `new`."""
    return lambda folder: edit_index(
        folder, lambda record: record["weight_map"].update({EMBEDDING: new})
    )


def write_index(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(content)  # type: ignore[return-value]


@pytest.mark.parametrize(("spoil", "complaint"), [
    (hold_twice, f"both hold {EMBEDDING}: download the model again, into an empty folder"),
    (lose_a_tensor, f"lacks {EMBEDDING}, which {INDEX} expects in it"),
    (rename_shard("../source/model.safetensors"), "'../source/model.safetensors', which is not inside its folder"),
    (rename_shard("/etc/passwd"), "'/etc/passwd', which is not inside its folder"),
    (rename_shard("none.safetensors"), "names none.safetensors, which is not there"),
    (rename_shard("config.json"), "config.json cannot be read"),
    (write_index("{"), f"{INDEX} cannot be read"),
    (write_index("{}"), f"{INDEX} has no weight_map"),
    (write_index('{"weight_map": []}'), "weight_map is list in place of dict"),
    (write_index('{"weight_map": {"a": 3}}'), "weight_map.a is int in place of str"),
    (lambda folder: (folder / INDEX).unlink(), f"has no model.safetensors and no {INDEX}"),
    (lambda folder: save_file({}, folder / "model.safetensors"), "model.safetensors and an index of other files"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")  # fmt: skip
def test_an_index_that_does_not_fit_is_refused(spoil, complaint, sharded: Path, refusal) -> None:
    spoil(sharded)
    output = sharded.parent / "ours"
    assert complaint in refusal("import", sharded, "--output", output)
    assert not output.exists()
