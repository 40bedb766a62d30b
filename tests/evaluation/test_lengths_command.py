"""`anlit lengths` as a command: the files that it writes, its defaults, and what it refuses."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit import GPT, AnGPT
from anlit.commands.lengths import main
from anlit.errors import UserError
from tests.evaluation.saved import VAL_TOKENS, make_run, prepare


def test_command_writes_table_numbers_and_picture(run: Path, data: Path, tmp_path: Path, capsys) -> None:
    second = make_run(tmp_path / "gpt-2", data, GPT, seed=2)
    other = make_run(tmp_path / "angpt", data, AnGPT)
    out = tmp_path / "made" / "out"
    assert main([str(run), str(second), str(other), f"--output={out}", "--lengths=64,16", "--tokens=1000"]) == 0

    record = json.loads((out / "lengths.json").read_text())
    assert record["command"].startswith("anlit lengths ")
    assert {"git", "versions", "hardware", "device", "data", "settings"} <= record.keys()
    assert record["settings"]["tokens"] == 960
    assert [one["seed"] for one in record["checkpoints"]] == [1, 2, 1]
    assert [arm["checkpoints"] for arm in record["arms"]] == [[0, 1], [2]]
    totals = [
        next(one["total"]["loss"] for one in own if (one["length"], one["masking"]) == (64, False))
        for own in record["measurements"][:2]
    ]
    loss = next(one for one in record["arms"][0]["loss"] if (one["length"], one["masking"]) == (64, False))
    assert loss["mean"] == pytest.approx(np.mean(totals))
    assert loss["sd"] == pytest.approx(np.std(totals, ddof=1))

    markdown = (out / "lengths.md").read_text()
    label = record["arms"][0]["label"]
    cells = [line.split(" | ") for line in markdown.splitlines() if line.startswith(f"| {label} | no | 64 |")]
    assert [row[4] for row in cells] == [f"{loss['mean']:.4f} ± {loss['sd']:.4f}"]
    assert "| 32 – 63 | 480 |" in markdown
    assert "Evaluated on 960 tokens and not 1,000" in markdown
    assert (out / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert f"{loss['mean']:.4f} ± {loss['sd']:.4f}" in capsys.readouterr().out


def lengths(output: Path, *arguments: object) -> dict[str, Any]:
    """The content of lengths.json."""
    assert main([*map(str, arguments), f"--output={output}"]) == 0
    return json.loads((output / "lengths.json").read_text())


def test_default_lengths_are_1_4_and_16_times_the_training_length(run: Path, tmp_path: Path) -> None:
    settings = lengths(tmp_path, run, "--masking=on")["settings"]
    assert settings["lengths"] == [16, 64, 256]
    assert settings["tokens"] == VAL_TOKENS // 256 * 256


def test_the_record_gives_the_same_report_again(run: Path, tmp_path: Path, capsys) -> None:
    record = lengths(tmp_path, run, "--lengths=16,64")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    printed = capsys.readouterr().out
    assert {f"lengths.{kind}" for kind in ("json", "md", "html", "png", "pdf", "svg")} == before.keys()
    for name in before.keys() - {"lengths.json"}:
        (tmp_path / name).unlink()
    assert lengths(tmp_path, tmp_path / "lengths.json") == record
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"command": 1}'])
def test_what_is_no_record_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match=r"other\.json .*: give (the|its) lengths\.json"):
        main([str(tmp_path / "other.json"), f"--output={tmp_path}"])


def test_a_loss_that_is_not_finite_is_told(run: Path, tmp_path: Path, capsys) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "broken"))
    file = folder / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.embedding.weight"][:] = math.nan
    torch.save(content, file)
    assert lengths(tmp_path, folder, "--lengths=16")["arms"][0]["loss"][0]["mean"] is None
    assert "not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lengths=0,16"], "--lengths '0,16' is no list of positive whole numbers"),
        (["--tokens=0"], "--tokens is 0"),
        (["--batch_tokens=-1"], "--batch_tokens is -1"),
        (["--masking=maybe"], "--masking 'maybe' is unknown: choose on, off or on,off"),
        (["--lengths=16,2048"], f"/val has {VAL_TOKENS - 1:,} tokens to predict and this needs 2,048: set --lengths"),
        (["--lengths=47,48"], "needs 2,256, the least common multiple of 47,48"),
        (["--lengths=16,64", "--tokens=50"], "--tokens is 50 and --lengths 16,64 need 64 at least"),
    ],
)
def test_wrong_settings_are_one_sentence(run: Path, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        main([str(run), f"--output={tmp_path / 'out'}", *arguments])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_checkpoints_of_different_data_are_not_compared(run: Path, tmp_path: Path) -> None:
    other = prepare(tmp_path / "other", seed=9)
    second = make_run(tmp_path / "gpt-2", other, GPT)
    with pytest.raises(UserError, match=r"have different data .* set --data"):
        lengths(tmp_path / "out", run, second, "--lengths=16")
    record = lengths(tmp_path / "out", run, second, "--lengths=16", f"--data={other}")
    assert record["data"]["path"] == str(other)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output .* cannot be made"):
        lengths(tmp_path / "file", run)
