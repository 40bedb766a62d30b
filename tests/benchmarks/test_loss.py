"""`anlit benchmark loss` at a tiny size: what is right is timed, what is wrong or fails is not."""

import json
from pathlib import Path

import pytest
import torch

from anlit.benchmarks import loss
from anlit.commands.benchmark import main


def test_ways_to_the_loss(tmp_path: Path, monkeypatch, capsys) -> None:
    def broken(*given: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(loss.WAYS, "torch", lambda *given: (0, 3 * loss.full(*given)))
    monkeypatch.setitem(loss.WAYS, "broken", broken)
    shape = ["--batch", "2", "--length", "64", "--d_model", "8", "--vocab_size", "300", "--device", "cpu"]
    assert main(["loss", *shape, "--output", str(tmp_path)]) == 0
    (group,) = json.loads((tmp_path / "loss.json").read_text())["groups"]
    rows = {row["label"]: row for row in group["rows"]}
    assert {name: row["reason"] for name, row in rows.items()} == {
        "full": None, "anlit": None, "torch": "it is wrong: relative error 2.0e+00 of its gradients",
        "broken": "it fails: out of memory",
    }  # fmt: skip
    assert rows["full"]["loss"] == pytest.approx(6.2, abs=0.4)
    assert rows["anlit"]["loss"] == pytest.approx(rows["full"]["loss"])
    assert 0 == rows["full"]["error"] < rows["anlit"]["error"] < 1e-5
    assert "torch: it is wrong" in capsys.readouterr().out
