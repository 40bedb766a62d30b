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
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.loading import load_checkpoint
from anlit.errors import UserError
from tests.checkpoints.foreign import RunsCode, with_sums, write_parts
from tests.models.tiny import fit, tiny

EMBEDDING = "state_dict.model.embedding.weight"


def assert_refused(path: Path, says: str = "") -> None:
    """By whatever reads a model, in one sentence; no folder `trace` is made beside it."""
    for attempt in (lambda: load_checkpoint(str(path)), lambda: load_initial_weights(tiny(GPT), str(path))):
        with pytest.raises(UserError, match="cannot be read as a checkpoint") as error:
            attempt()
        assert "\n" not in str(error.value)
        assert says in str(error.value)
    assert not path.with_name("trace").exists(), "its code was run"


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict[str, Any]:
    model, file = fit(tiny(GPT), max_steps=1), tmp_path_factory.mktemp("whole") / "a.ckpt"
    model.trainer.save_checkpoint(file)
    return torch.load(file, weights_only=True)


def test_a_file_or_the_rest_of_a_sharded_one_is_not_unpickled(content, tmp_path: Path) -> None:
    hostile = {**content, "extra": RunsCode(tmp_path / "trace")}
    torch.save(hostile, tmp_path / "a.ckpt")
    assert_refused(tmp_path / "a.ckpt", "(Weights only load failed)")
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(RunsCode(tmp_path / "trace")))
    assert_refused(tmp_path / "b.ckpt")
    assert_refused(write_parts(hostile, tmp_path / "rest"))


def test_parts_are_the_same_as_one_file(content, tmp_path: Path) -> None:
    whole = read_checkpoint(write_parts(content, tmp_path / "whole"))
    assert whole.keys() == content.keys()
    for name, tensor in content["state_dict"].items():
        assert torch.equal(whole["state_dict"][name], tensor)
    assert str(whole["optimizer_states"]) == str(content["optimizer_states"])


@pytest.mark.parametrize("with_parts", [False, True])
def test_torch_s_own_format_is_not_read(content, with_parts: bool, tmp_path: Path) -> None:
    """None of the files that torch's reader would unpickle, not even beside files that are read."""
    folder = write_parts(content, tmp_path / "a")
    for name in (".metadata", "__0.metadata", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(RunsCode(tmp_path / "trace")))
    if with_parts:
        load_checkpoint(str(folder))
        assert not (tmp_path / "trace").exists()
    else:
        for file in folder.glob("*.safetensors"):
            file.unlink()
        assert_refused(with_sums(folder), "has no .safetensors file")


def rewrite(file: Path, offsets: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Write the part of the only rank again; a tensor that is None is left out."""
    held = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    saved = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()} | (offsets or {})
    save_file(held, file, metadata={"DCP_SHARDING_INFO": json.dumps(saved)})


def offset(value: Any) -> Callable[[Path], None]:
    return lambda file: rewrite(file, {EMBEDDING: value})


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "rows beyond the file": (offset({"saved_offsets": [10**12, 0]}), "do not fit together"),
    "columns beyond the file": (offset({"saved_offsets": [0, 10**12]}), "do not fit together"),
    "more rows than a number has": (offset({"saved_offsets": [10**30, 0]}), "cannot be read"),
    "a negative row": (offset({"saved_offsets": [-1, 0]}), "do not fit together"),
    "one offset for two dimensions": (offset({"saved_offsets": [0]}), "do not fit together"),
    "no offsets": (offset("x"), "cannot be read"),
    "null": (offset(None), "cannot be read"),
    "a header larger than the file": (lambda file: file.write_bytes(struct.pack("<Q", 2**40) + b"{}"), ""),
    "deep JSON": (
        lambda file: save_file({"a": torch.ones(1)}, file, metadata={"DCP_SHARDING_INFO": "[" * 60_000}),
        "cannot be read",
    ),
    "a pipe": (pipe, "is no file"),
    "a tensor less": (lambda file: rewrite(file, **{EMBEDDING: None}), "have no state_dict.model.embedding.weight"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_claims_what_it_has_not(content, damage: str, tmp_path: Path) -> None:
    folder = write_parts(content, tmp_path / "parts")
    change, says = DAMAGE[damage]
    change(next(folder.glob("*.safetensors")))
    assert_refused(with_sums(folder), says)


def test_weights_of_whole_numbers_are_refused(content, tmp_path: Path) -> None:
    folder = write_parts(content, tmp_path / "parts")
    small = content["state_dict"]["model.embedding.weight"].to(torch.int8)
    rewrite(next(folder.glob("*.safetensors")), **{EMBEDDING: small})
    with pytest.raises(UserError, match=r"has torch\.int8 for the weights model\.embedding\.weight"):
        load_checkpoint(str(with_sums(folder)))
