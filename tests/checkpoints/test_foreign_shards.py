"""Files and shards that would run code, or claim more memory than they have, are refused."""

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
from tests.checkpoints.foreign import RunsCode, content_of, refused, write_checksums, write_shard
from tests.nn.models.tiny import tiny

EMBEDDING = "state_dict.model.embedding.weight"


def assert_refused(path: Path, reason: str = "") -> None:
    """Loading and `--initial_weights` refuse the path in a sentence, and run no code."""
    message = rf"^[^\n]*cannot be read as a checkpoint[^\n]*{reason}[^\n]*$"
    with pytest.raises(UserError, match=message):
        load_checkpoint(str(path))
    with pytest.raises(UserError, match=message):
        load_initial_weights(tiny(GPT), str(path))
    assert not path.with_name("trace").exists(), "foreign code has run"


@pytest.fixture
def content(trained_run: Path) -> dict[str, Any]:
    return content_of(trained_run)


@pytest.fixture
def shard(content: dict[str, Any], tmp_path: Path) -> Path:
    """The only shard of a checkpoint."""
    folder = write_shard(content, tmp_path / "shards")
    (file,) = folder.glob("*.safetensors")
    return file


def test_a_single_file_is_not_unpickled(tmp_path: Path) -> None:
    hostile = RunsCode(tmp_path / "trace")
    file = tmp_path / "b.ckpt"
    file.write_bytes(pickle.dumps(hostile))

    assert_refused(file)


def test_the_structure_of_a_sharded_checkpoint_is_not_unpickled(content, tmp_path: Path) -> None:
    hostile = {**content, "extra": RunsCode(tmp_path / "trace")}

    folder = write_shard(hostile, tmp_path / "hostile")

    assert_refused(folder)


def test_shards_have_the_same_content_as_one_file(content, tmp_path: Path) -> None:
    folder = write_shard(content, tmp_path / "a")

    loaded = read_checkpoint(folder)

    weights = dict(content["state_dict"])
    assert loaded.keys() == content.keys()
    torch.testing.assert_close(loaded["state_dict"], weights, rtol=0, atol=0)
    assert str(loaded["optimizer_states"]) == str(content["optimizer_states"])


def write_pickled_format(folder: Path) -> None:
    """Write the files of torch's pickled format, which would run code."""
    hostile = RunsCode(folder.with_name("trace"))
    for name in (".metadata", "__0.metadata", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(hostile))


def test_torch_s_pickled_format_beside_the_shards_is_not_read(content, tmp_path: Path) -> None:
    folder = write_shard(content, tmp_path / "a")
    write_pickled_format(folder)

    loaded = read_checkpoint(folder)

    assert loaded.keys() == content.keys()
    assert not (tmp_path / "trace").exists(), "foreign code has run"


def test_torch_s_pickled_format_without_shards_is_refused(content, tmp_path: Path) -> None:
    folder = write_shard(content, tmp_path / "a")
    write_pickled_format(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()

    assert_refused(write_checksums(folder), "has no .safetensors file")


def rewrite(file: Path, offsets: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Write the shard again with changed offsets and tensors; None removes a tensor."""
    saved: dict[str, torch.Tensor] = {}
    sharding: dict[str, Any] = {}
    for name, tensor in (load_file(file) | tensors).items():
        if tensor is not None:
            saved[name] = tensor
            sharding[name] = {"saved_offsets": [0] * tensor.dim()}
    sharding |= offsets or {}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding)}
    save_file(saved, file, metadata)


def set_offset(*offset: Any) -> Callable[[Path], None]:
    """A damage: the embedding's part begins at this offset of the whole tensor."""
    return lambda file: rewrite(file, {EMBEDDING: {"saved_offsets": offset}})


def remove_offsets(file: Path) -> None:
    rewrite(file, {EMBEDDING: "x"})


def claim_long_header(file: Path) -> None:
    length = struct.pack("<Q", 2**40)
    file.write_bytes(length + b"{}")


def nest_deeply(file: Path) -> None:
    metadata = {"DCP_SHARDING_INFO": "[" * 60_000}
    save_file({"a": torch.ones(1)}, file, metadata)


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def remove_tensor(file: Path) -> None:
    rewrite(file, **{EMBEDDING: None})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(set_offset(10**12, 0), "do not fit together", id="rows beyond the file"),
        pytest.param(set_offset(10**30, 0), "", id="more rows than an integer has"),
        pytest.param(set_offset(0), "do not fit together", id="an offset for two dimensions"),
        pytest.param(remove_offsets, "cannot be read", id="no offsets"),
        pytest.param(claim_long_header, "", id="a header beyond the file"),
        pytest.param(nest_deeply, "cannot be read", id="deep JSON"),
        pytest.param(replace_by_pipe, "pipe in its place", id="a pipe"),
        pytest.param(remove_tensor, f"have no {EMBEDDING}", id="a tensor less"),
    ],
)
def test_a_damaged_shard_is_refused(
    shard: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(shard)

    folder = write_checksums(shard.parent)
    assert_refused(folder, reason)


def test_weights_of_whole_numbers_are_refused(shard: Path) -> None:
    whole_numbers = load_file(shard)[EMBEDDING].to(torch.int8)
    rewrite(shard, **{EMBEDDING: whole_numbers})
    folder = write_checksums(shard.parent)

    message = refused(folder)

    assert "has torch.int8 for the weights model.embedding.weight" in message
