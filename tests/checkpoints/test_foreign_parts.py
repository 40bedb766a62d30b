"""A checkpoint of one file or of parts that was made to run code, or to take more memory than it has, is refused."""

import collections
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import filesystem, metadata

from anlit import GPT
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.errors import UserError
from tests.checkpoints.foreign import RunsCode, with_sums, write_parts
from tests.models.tiny import fit, tiny

EMBEDDING = "state_dict.model.embedding.weight"


def refused(path: Path, trace: Path, capsys: pytest.CaptureFixture[str], says: str = "") -> None:
    for attempt in (lambda: load_checkpoint(str(path)), lambda: load_initial_weights(tiny(GPT), str(path))):
        with pytest.raises(UserError, match="cannot be read as a checkpoint") as error:
            attempt()
        assert "\n" not in str(error.value)
        assert says in str(error.value)
    assert main(["export", str(path), "--output", str(path.parent / "exported")]) == 2
    assert "cannot be read as a checkpoint" in capsys.readouterr().err
    assert not trace.exists(), "its code was run"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, file = fit(tiny(GPT), max_steps=1), tmp_path_factory.mktemp("whole") / "a.ckpt"
    model.trainer.save_checkpoint(file)
    return torch.load(file, weights_only=True)


def test_one_file(content, tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace"
    torch.save({**content, "extra": RunsCode(trace)}, tmp_path / "a.ckpt")
    refused(tmp_path / "a.ckpt", trace, capsys)
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(RunsCode(trace)))
    refused(tmp_path / "b.ckpt", trace, capsys)


def test_parts_are_the_same_as_one_file(content, tmp_path: Path) -> None:
    whole = read_checkpoint(write_parts(content, tmp_path / "whole"))
    assert whole.keys() == content.keys()
    for name, tensor in content["state_dict"].items():
        assert torch.equal(whole["state_dict"][name], tensor)
    assert str(whole["optimizer_states"]) == str(content["optimizer_states"])


def test_the_rest_of_a_sharded_one_is_not_unpickled(content, tmp_path: Path, capsys) -> None:
    folder = write_parts({**content, "extra": RunsCode(tmp_path / "trace")}, tmp_path / "rest")
    refused(folder, tmp_path / "trace", capsys)


class Falsy:
    """An empty dictionary with the two attributes of torch's metadata."""

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), {"state_dict_metadata": {}, "storage_data": {}}


def two_faced(marker: Path) -> bytes:
    """A zip, a legacy file of plain values, and a zstd frame whose content runs code: each reader sees another one."""
    legacy, harmless = io.BytesIO(), io.BytesIO()
    torch.save({}, legacy, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(harmless, "w") as archive:
        archive.writestr("a", "b")
    skipped = (bytes(36) + legacy.getvalue()).ljust(1024, b"\0")  # to a pickle, text: this frame's first 44 bytes
    evil = zstandard.ZstdCompressor().compress(pickle.dumps(RunsCode(marker)))
    frames = [struct.pack("<4sI", b"U*M\x18", len(data)) + data for data in (skipped, harmless.getvalue())]
    return frames[0] + evil + frames[1]


def of_torch(folder: Path, content: dict[str, Any], description: Any, files: dict[str, bytes]) -> Path:
    """A checkpoint in torch's own format, with the sums that an earlier anlit asked for."""
    folder.mkdir()
    rest = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}
    torch.save(rest, folder / "meta.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(description))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    sums = {"crc32": {".metadata": zlib.crc32((folder / ".metadata").read_bytes())}, "bytes": {}}
    (folder / "sums.json").write_text(json.dumps(sums))
    return folder


@pytest.mark.parametrize("attack", ["a part of several formats", "a second .metadata"])
def test_torch_s_own_format_is_not_read(content, attack: str, tmp_path: Path, capsys) -> None:
    """What torch would unpickle in such a folder, nobody does."""
    trace = tmp_path / "trace"
    if attack == "a second .metadata":
        folder = of_torch(tmp_path / "a", content, Falsy(), {"__0.metadata": pickle.dumps(RunsCode(trace))})
    else:
        part = two_faced(trace)
        stored = filesystem._StorageInfo("__0_0.distcp", 0, len(part), ["stream.zstd/1"])
        entry = {metadata.MetadataIndex("extra"): stored}
        description = metadata.Metadata({"extra": metadata.BytesStorageMetadata()}, storage_data=entry)
        folder = of_torch(tmp_path / "a", content, description, {"__0_0.distcp": part})
    refused(folder, trace, capsys)
    (folder / "sums.json").write_text("{}")  # whoever makes the folder can make those of today
    refused(folder, trace, capsys, "has no .safetensors file")


def change_part(folder: Path, offsets: Any = None, **tensors: Any) -> None:
    """Write the part of the only rank again."""
    (file,) = folder.glob("*.safetensors")
    held = load_file(file) | tensors
    saved = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()}
    save_file(held, file, metadata={"DCP_SHARDING_INFO": json.dumps({**saved, **(offsets or {})})})
    with_sums(folder)


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ({EMBEDDING: {"saved_offsets": [10**12, 0]}}, "do not fit together"),
        ({EMBEDDING: {"saved_offsets": [0, 10**12]}}, "cannot be read"),
        ({EMBEDDING: {"saved_offsets": [-1, 0]}}, "cannot be read"),
        ({EMBEDDING: {"saved_offsets": [0]}}, "cannot be read"),
        ({EMBEDDING: "x"}, "cannot be read"),
        ({EMBEDDING: None}, "cannot be read"),
    ],
)
def test_a_header_that_claims_what_its_file_has_not(content, offsets, says: str, tmp_path: Path, capsys) -> None:
    folder = write_parts(content, tmp_path / "parts")
    change_part(folder, offsets)
    refused(folder, tmp_path / "trace", capsys, says)


@pytest.mark.parametrize("damage", ["a large header", "deep JSON", "a pipe", "a tensor less"])
def test_parts_that_nobody_wrote(content, damage: str, tmp_path: Path, capsys) -> None:
    folder = write_parts(content, tmp_path / "parts")
    (file,) = folder.glob("*.safetensors")
    if damage == "a large header":
        file.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    elif damage == "deep JSON":
        save_file({"a": torch.ones(1)}, file, metadata={"DCP_SHARDING_INFO": "[" * 60_000})
    elif damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        held = {name: tensor for name, tensor in load_file(file).items() if name != EMBEDDING}
        offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()}
        save_file(held, file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    with_sums(folder)
    refused(folder, tmp_path / "trace", capsys)


def test_weights_of_whole_numbers_are_refused(content, tmp_path: Path) -> None:
    folder = write_parts(content, tmp_path / "parts")
    change_part(folder, **{EMBEDDING: content["state_dict"]["model.embedding.weight"].to(torch.int8)})
    with pytest.raises(UserError, match=r"has torch\.int8 for the weights model\.embedding\.weight"):
        load_checkpoint(str(folder))
