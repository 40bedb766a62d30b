"""`anlit benchmark growth`, `loss` and `folding` at tiny sizes, and the arithmetic of what they report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit.benchmarks import loss
from anlit.benchmarks.growth.benchmark import BASES, fits, size_at
from anlit.benchmarks.growth.plot import plot
from anlit.commands.benchmark import main
from anlit.errors import UserError
from anlit.reporting.intervals import power_law
from tests.benchmarks.sizes import SHAPE


def test_growth_over_layers(tmp_path: Path, capsys) -> None:
    options = ["--preset", "cpu", *SHAPE, "--grow", "L", "--values", "1,2,4", "--models", "GPT,anGPT", "--rounds", "2"]
    assert main(["growth", *options, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    groups = record["groups"]
    rows = [row for group in groups for row in group["rows"]]
    assert [(group["axis"], group["value"]) for group in groups] == [("L", 1), ("L", 2), ("L", 4)]
    assert [row["model"] for row in rows] == ["GPT", "anGPT"] * 3
    assert all(len(row["seconds"]["train"]["values"]) == 2 for row in rows)
    flops = [row["flops"]["train"] for row in rows if row["model"] == "GPT"]
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0])  # of the blocks; the head's stays
    assert {fit["model"] for fit in record["fits"]} == {"GPT", "anGPT"}
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "FLOPs' exponent" in capsys.readouterr().out


def test_a_sequence_longer_than_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one sequence of 32 has more"):
        main(["growth", "--preset", "cpu", *SHAPE, "--grow", "T", "--values", "32", "--output", str(tmp_path)])


def test_what_grows_and_what_stays() -> None:
    base = BASES["cpu"]
    longer, wider, deeper = size_at(base, "T", 1024), size_at(base, "d", 512), size_at(base, "L", 8)
    assert (longer.length, longer.batch, longer.tokens) == (1024, 2, base.tokens)
    assert (wider.d_model, wider.d_model // wider.n_heads) == (512, 64)
    assert (deeper.n_layers, deeper.d_model, deeper.length) == (8, base.d_model, base.length)


def test_exponents_are_those_of_powers(tmp_path: Path) -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    found = power_law(x, [3 * value**1.5 for value in x])
    assert found is not None
    assert (*found.exponent, found.constant) == pytest.approx((1.5, 1.5, 1.5, 3.0))
    noisy = power_law(x, [1.0, 2.2, 3.7, 8.4])
    assert noisy is not None
    assert noisy.exponent.low < noisy.exponent.median < noisy.exponent.high
    places, logs = np.arange(4) - 1.5, np.log2([1.0, 2.2, 3.7, 8.4])
    slope = places @ logs / (places @ places)
    residuals = logs - logs.mean() - slope * places
    error = np.sqrt(residuals @ residuals / 2 / (places @ places))
    assert noisy.exponent.median == pytest.approx(slope)
    assert noisy.exponent.high - noisy.exponent.median == pytest.approx(
        4.3027 * error, rel=1e-4
    )  # Student's t, two degrees
    assert power_law(x[:2], x[:2]) is None

    rows: list[dict[str, Any]] = [
        {"model": "nGPT", "flops": {"train": value}, "peak_bytes": None, "seconds": {"train": {"median": value**2}}}
        for value in x
    ]
    groups = [{"axis": "T", "value": int(512 * value), "rows": [row]} for value, row in zip(x, rows, strict=True)]
    groups.append({"axis": "T", "value": 8192, "rows": [{"model": "nGPT", "reason": "out of memory"}]})
    (fit,) = fits(groups)
    assert (fit["x"], fit["bytes"]) == ([512, 1024, 2048, 4096], None)
    assert fit["seconds"].exponent.median == pytest.approx(2)
    assert fit["flops"].exponent.median == pytest.approx(1)
    plot([fit], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_ways_to_the_loss(tmp_path: Path, monkeypatch, capsys) -> None:
    def three_times(h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = loss.full(h, weight, targets)
        return value.detach(), 3 * value

    def broken(*given: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(loss.WAYS, "torch", three_times)
    monkeypatch.setitem(loss.WAYS, "broken", broken)
    shape = ["--batch", "2", "--length", "64", "--d_model", "8", "--vocab_size", "300", "--device", "cpu"]
    assert main(["loss", *shape, "--output", str(tmp_path)]) == 0
    (group,) = json.loads((tmp_path / "loss.json").read_text())["groups"]
    rows = {row["label"]: row for row in group["rows"]}
    assert list(rows) == ["full", "anlit", "torch", "broken"]
    assert rows["full"]["loss"] == pytest.approx(6.2, abs=0.4)
    assert rows["full"]["error"] == 0
    assert 0 < rows["anlit"]["error"] < 1e-5
    assert rows["anlit"]["loss"] == pytest.approx(rows["full"]["loss"])
    assert rows["anlit"]["reason"] is None
    assert rows["broken"]["reason"] == "it fails: out of memory"
    assert rows["torch"]["reason"] == "it is wrong: relative error 2.0e+00 of its gradients"
    assert "torch: it is wrong" in capsys.readouterr().out


def test_generating_with_shared_keys(tmp_path: Path, capsys) -> None:
    options = ["--groups", "1,2", "--tokens", "4", "--rounds", "2", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["decoding", *SHAPE, *options]) == 0
    (group,) = json.loads((tmp_path / "decoding.json").read_text())["groups"]
    own, shared = group["rows"]
    assert (own["label"], shared["label"]) == ("a key for every head", "groups of 2")
    assert own["cache_bytes"] == 2 * shared["cache_bytes"] > 0
    assert all(len(row["seconds"]["step"]["values"]) == 2 for row in (own, shared))
    assert "groups of 2" in capsys.readouterr().out
    with pytest.raises(UserError, match="--groups must be divisors of the"):
        main(["decoding", *SHAPE, "--groups", "7", "--output", str(tmp_path)])


def test_folded_models_beside_gpt_plus(tmp_path: Path, capsys) -> None:
    assert main(["folding", *SHAPE, "--rounds", "2", "--device", "cpu", "--output", str(tmp_path)]) == 0
    (group,) = json.loads((tmp_path / "folding.json").read_text())["groups"]
    rows = group["rows"]
    assert [row["label"] for row in rows] == ["GPT+", "nGPT", "nGPT, folded", "anGPT", "anGPT, folded"]
    assert all(len(row["seconds"]["forward"]["values"]) == 2 for row in rows)
    assert rows[0]["beside"]["forward"]["median"] == 1
    assert "anGPT, folded" in capsys.readouterr().out
