"""The attention benchmark: a small one that runs, wrong kernels found out, and what its tables say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit.attention.backends import eager
from anlit.benchmarks import attention
from anlit.commands.benchmark import main
from anlit.errors import UserError


def run(folder: Path, *options: str) -> dict[str, Any]:
    defaults = ["--preset", "cpu", "--widths", "8", "--lengths", "32", "--rounds", "2", "--output", str(folder)]
    assert main(["attention", *defaults, *options]) == 0
    return json.loads((folder / "attention.json").read_text())


def rows(record: dict[str, Any], number: int) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in record["groups"][number]["rows"]}


def test_it_measures_and_writes_each_entrant(tmp_path: Path) -> None:
    record = run(tmp_path)
    dense, packed = (rows(record, number) for number in range(2))
    assert dense.keys() == {", ".join(entrant) for entrant in attention.PRESETS["cpu"]["entrants"]}
    pairs = 32 * 33 // 2 * 128 * 16  # 128 sequences of 32, 16 heads of width 8
    for row in dense.values():
        assert row["reason"] is None
        assert len(row["seconds"]["both"]["values"]) == 2
        assert row["error"].keys() >= {"out", "q", "k", "v"}
        assert row["flops"] == {"forward": 4 * 8 * pairs, "both": 3.5 * 4 * 8 * pairs}
    row = dense["plain, sdpa"]
    assert packed["plain, sdpa"]["flops"]["both"] < 0.5 * row["flops"]["both"]
    share = row["flops"]["both"] / row["seconds"]["both"]["median"] / record["peak_flops_per_second"]
    line = next(line for line in (tmp_path / "attention.md").read_text().splitlines() if "| plain, sdpa |" in line)
    assert f"| {share:.1%} | 1.000 (1.000 – 1.000) |" in line


def test_an_entrant_that_is_wrong_fails_or_is_unsupported_is_named_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(attention.BACKENDS["blockwise"], "attend", lambda *given: 1.001 * eager.attend(*given))
    monkeypatch.setattr(attention.BACKENDS["sdpa"], "attend", broken)
    entrants = "plain,eager plain,blockwise plain,sdpa scale-invariant,flash plain,flex"
    reasons = {name: row["reason"] for name, row in rows(run(tmp_path, "--entrants", entrants), 0).items()}
    assert reasons.pop("plain, eager") is None
    said = ("it is wrong: relative error 1", "it fails: out of memory", "a(t)", "backward")
    assert all(part in reason for part, reason in zip(said, reasons.values(), strict=True))
    assert "it fails: out of memory" in capsys.readouterr().out


def test_the_time_limit_names_what_it_left_out(tmp_path: Path) -> None:
    record = run(tmp_path, "--minutes", "0")
    assert record["groups"] == []
    assert record["left_out"] == ["D 8, T 32, dense, 128 × 16 heads", "D 8, T 32, documents, 128 × 16 heads"]
    assert "Left out after 0 minutes: D 8, T 32, dense" in (tmp_path / "attention.md").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--entrants", "plane,sdpa"], "--entrants plane,sdpa: no mechanism 'plane'; choose plain"),
        (["--entrants", "plain,sdp"], "no kernel 'sdp'; choose flash"),
        (["--layouts", "sparse"], "--layouts sparse is not known: choose from dense, documents"),
        pytest.param(["--preset", "h200"], "--preset h200 needs a CUDA device",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(tmp_path: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, *options)
