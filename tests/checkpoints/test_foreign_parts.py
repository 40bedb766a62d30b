"""A checkpoint of one file or of parts that was made to run code, or to take more memory than it has, is refused."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit import GPT
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.errors import UserError
from anlit.training.initial_weights import load_initial_weights
from anlit.training.load_model import load_checkpoint
from tests.checkpoints.foreign import RunsCode, content_of, refused, with_sums, write_parts
from tests.nn.models.tiny import tiny

EMBEDDING = "state_dict.model.embedding.weight"


def assert_refused(path: Path, says: str = "") -> None:
    """By whatever reads a model, in one sentence; no folder `trace` is made beside it."""
    for attempt in (
        lambda: load_checkpoint(str(path)),
        lambda: load_initial_weights(tiny(GPT), str(path)),
    ):
        with pytest.raises(
            UserError, match=rf"^[^\n]*cannot be read as a checkpoint[^\n]*{says}[^\n]*$"
        ):
            attempt()
    assert not path.with_name("trace").exists(), "its code was run"


@pytest.fixture
def content(trained_run: Path) -> dict[str, Any]:
    return content_of(trained_run)


def test_a_file_or_the_rest_of_a_sharded_one_is_not_unpickled(content, tmp_path: Path) -> None:
    hostile = {**content, "extra": RunsCode(tmp_path / "trace")}
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(RunsCode(tmp_path / "trace")))
    assert_refused(tmp_path / "b.ckpt")
    assert_refused(write_parts(hostile, tmp_path / "rest"))


def test_parts_are_the_same_as_one_file_and_torch_s_own_format_beside_them_is_not_read(
    content, tmp_path: Path
) -> None:
    folder = write_parts(content, tmp_path / "a")
    for name in (".metadata", "__0.metadata", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(RunsCode(tmp_path / "trace")))
    whole = read_checkpoint(folder)
    assert whole.keys() == content.keys()
    torch.testing.assert_close(whole["state_dict"], dict(content["state_dict"]), rtol=0, atol=0)
    assert str(whole["optimizer_states"]) == str(content["optimizer_states"])
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert_refused(with_sums(folder), "has no .safetensors file")


def rewrite(file: Path, offsets: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Write the part of the only rank again; a tensor that is None is left out."""
    held = {
        name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None
    }
    saved = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()} | (
        offsets or {}
    )
    save_file(held, file, metadata={"DCP_SHARDING_INFO": json.dumps(saved)})


def offset(*value: Any) -> Callable[[Path], None]:
    return lambda file: rewrite(file, {EMBEDDING: {"saved_offsets": value}})


def deep(file: Path) -> None:
    save_file({"a": torch.ones(1)}, file, metadata={"DCP_SHARDING_INFO": "[" * 60_000})


@pytest.mark.parametrize(("damage", "says"), [
    pytest.param(offset(10**12, 0), "do not fit together", id="rows beyond the file"),
    pytest.param(offset(10**30, 0), "", id="more rows than a number has"),
    pytest.param(offset(0), "do not fit together", id="one offset for two dimensions"),
    pytest.param(lambda file: rewrite(file, {EMBEDDING: "x"}), "cannot be read", id="no offsets"),
    pytest.param(lambda file: file.write_bytes(struct.pack("<Q", 2**40) + b"{}"), "", id="a header beyond it"),
    pytest.param(deep, "cannot be read", id="deep JSON"),
    pytest.param(lambda file: (file.unlink(), os.mkfifo(file)), "pipe in its place", id="a pipe"),
    pytest.param(lambda file: rewrite(file, **{EMBEDDING: None}), f"have no {EMBEDDING}", id="a tensor less"),
])  # fmt: skip
def test_a_part_that_claims_what_it_has_not(
    content, damage: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    folder = write_parts(content, tmp_path / "parts")
    damage(next(folder.glob("*.safetensors")))
    assert_refused(with_sums(folder), says)


def test_weights_of_whole_numbers_are_refused(content, tmp_path: Path) -> None:
    folder = write_parts(content, tmp_path / "parts")
    (file,) = folder.glob("*.safetensors")
    rewrite(file, **{EMBEDDING: load_file(file)[EMBEDDING].to(torch.int8)})
    assert "has torch.int8 for the weights model.embedding.weight" in refused(with_sums(folder))
