"""Prepared folders that are damaged or do not fit the settings: one sentence each."""

import json
from pathlib import Path

import numpy as np
import pytest

from anlit.cli import main
from anlit.errors import UserError
from tests.data.modules import ready, with_trainer
from tests.data.prepared import write_prepared


def test_missing_foreign_and_unfinished_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere with token shards: set --data.path"):
        ready(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"not a prepared folder, it has no manifest\.json"):
        ready(str(tmp_path))
    (tmp_path / ".work").mkdir()
    with pytest.raises(UserError, match=r"preparation of .* is not finished: repeat the command"):
        ready(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\x00", "\xff"])
def test_damaged_manifest(own_shards: Path, text: str) -> None:
    (own_shards / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        ready(str(own_shards))


@pytest.mark.parametrize("version", [1, 99])
def test_shards_of_another_format(own_shards: Path, version: int) -> None:
    (own_shards / "manifest.json").write_text(json.dumps({"format_version": version}))
    with pytest.raises(UserError, match=f"shards of format {version} .* reads 2: remove the folder and prepare it"):
        ready(str(own_shards))


def test_missing_and_truncated_chunks(own_shards: Path) -> None:
    chunk = own_shards / "train" / "chunk-0-0.bin"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-2])
    with pytest.raises(
        UserError, match=rf"{chunk.name} is damaged \(it has {len(content) - 2:,} bytes .*anlit prepare"
    ):
        ready(str(own_shards))
    chunk.unlink()
    with pytest.raises(UserError, match=rf"{chunk.name} is damaged \(it is missing\)"):
        ready(str(own_shards))
    (own_shards / "train" / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json is damaged \(it is missing\)"):
        ready(str(own_shards))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chunks": [{}]}', '{"chunks": []}'])
def test_damaged_index(own_shards: Path, text: str) -> None:
    (own_shards / "train" / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"train(/index\.json)? is damaged \("):
        ready(str(own_shards))


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_found_while_training_is_one_sentence(own_shards: Path, workers: int) -> None:
    chunk = own_shards / "train" / "chunk-0-2.bin"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 64
    chunk.write_bytes(content)
    loader = ready(str(own_shards), num_workers=workers).train_dataloader()
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{chunk} is damaged (its CRC-32 is")
    assert "`anlit prepare Test --path data/test`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_longer_than_the_shards(prepared: str) -> None:
    with pytest.raises(
        UserError, match=r"context_length 46000 is too long .*train, .*--model.context_length to 45999 "
    ):
        ready(prepared, context_length=46_000, batch_size=1)
    ready(prepared, context_length=45_999, batch_size=1)


def test_more_sequences_wanted_than_there_are(prepared: str) -> None:
    ready(prepared, batch_size=718)
    with pytest.raises(UserError, match=r"batch_size 719 on each of 1 .*needs 719 sequences and .*train has 718 "):
        ready(prepared, batch_size=719)
    with pytest.raises(UserError, match=r"on each of 2 device\(s\) needs 720 sequences"):
        with_trainer(prepared, 0, 2, batch_size=360)


def test_nothing_to_validate_on(tmp_path: Path, streams: dict[str, np.ndarray]) -> None:
    write_prepared(tmp_path / "own", {**streams, "val": streams["val"][:1]})
    with pytest.raises(UserError, match="val has no token to predict"):
        ready(str(tmp_path / "own"))


def test_a_number_out_of_its_range_on_the_command_line(
    prepared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", "--data", "TokenShards", "--data.path", prepared, "--data.batch_size", "0", "--model", "GPT"]
    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last == "anlit: error: --data.batch_size is 0: set it to 1 or more."
