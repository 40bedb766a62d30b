"""`anlit benchmark growth`, `loss`, `profile` and `folding` at tiny sizes, and the arithmetic of what they report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit.benchmarks.command import main
from anlit.benchmarks.growth.command import BASES, exponent, fits, size_at
from anlit.benchmarks.growth.plot import plot
from anlit.benchmarks.loss import command as loss_command
from anlit.benchmarks.loss import ways
from anlit.benchmarks.loss.command import compare
from anlit.benchmarks.process import ProcessError
from anlit.benchmarks.step.ours import OurStep
from anlit.benchmarks.step.profile import floors
from anlit.benchmarks.step.profile_groups import GROUPS, group_of, marked, seconds_by_group
from anlit.errors import UserError
from tests.benchmarks.sizes import CPU, SHAPE, TINY


def test_growth_over_layers(tmp_path: Path, capsys) -> None:
    options = ["--preset", "cpu", *SHAPE, "--grow", "L", "--values", "1,2,4", "--models", "GPT,anGPT", "--rounds", "2"]
    assert main(["growth", *options, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    assert [(p["value"], p["model"]) for p in record["points"]] == [(n, m) for n in (1, 2, 4) for m in ("GPT", "anGPT")]
    assert [p["size"]["n_layers"] for p in record["points"]] == [1, 1, 2, 2, 4, 4]
    assert all(len(p["seconds"]["values"]) == 2 for p in record["points"])
    flops = [p["flops"] for p in record["points"] if p["model"] == "GPT"]
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0])  # of the blocks; the head's stays
    assert {fit["model"] for fit in record["fits"]} == {"GPT", "anGPT"}
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "FLOPs' exponent" in capsys.readouterr().out


def test_growth_has_a_time_limit_and_another_mechanism(tmp_path: Path) -> None:
    options = ["--preset", "cpu", *SHAPE, "--grow", "L", "--mechanism", "scale-invariant", "--output", str(tmp_path)]
    assert main(["growth", *options, "--minutes", "0"]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    assert record["points"] == []
    assert record["left_out"] == ["L = 1", "L = 2", "L = 4", "L = 8"]
    assert "Left out after 0 minutes: L = 1," in (tmp_path / "growth.md").read_text()
    assert main(["growth", *options, "--values", "1", "--models", "anGPT", "--rounds", "1"]) == 0
    record = json.loads((tmp_path / "growth.json").read_text())
    assert record["mechanism"] == "scale-invariant"
    assert [point["reason"] for point in record["points"]] == [None]


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
    found = exponent(x, [3 * value**1.5 for value in x])
    assert found == pytest.approx({"exponent": 1.5, "low": 1.5, "high": 1.5, "constant": 3.0})
    noisy = exponent(x, [1.0, 2.2, 3.7, 8.4])
    assert noisy is not None
    assert noisy["low"] < noisy["exponent"] < noisy["high"]
    places, logs = np.arange(4) - 1.5, np.log2([1.0, 2.2, 3.7, 8.4])
    slope = places @ logs / (places @ places)
    residuals = logs - logs.mean() - slope * places
    error = np.sqrt(residuals @ residuals / 2 / (places @ places))
    assert noisy["exponent"] == pytest.approx(slope)
    assert noisy["high"] - noisy["exponent"] == pytest.approx(4.3027 * error, rel=1e-4)  # Student's t, two degrees
    assert exponent(x[:2], x[:2]) is None

    points: list[dict[str, Any]] = [
        {"axis": "T", "value": int(512 * value), "model": "nGPT", "reason": None, "flops": value, "bytes": None,
         "seconds": {"median": value**2}} for value in x
    ]  # fmt: skip
    points.append({"axis": "T", "value": 8192, "model": "nGPT", "reason": "out of memory"})
    (fit,) = fits(points)
    assert (fit["points"], fit["bytes"]) == (4, None)
    assert fit["seconds"]["exponent"] == pytest.approx(2)
    assert fit["flops"]["exponent"] == pytest.approx(1)
    plot({"points": points, "fits": [fit]}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_ways_to_the_loss(tmp_path: Path, monkeypatch, capsys) -> None:
    """In this process: that another one answers, the tests of the step and of the data show."""

    def here(module: str, do: str, **arguments: Any) -> dict[str, Any]:
        if arguments["way"] == "broken":
            raise ProcessError("RuntimeError: out of memory")
        return json.loads(json.dumps(ways.measure(**arguments)))

    def three_times(h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = ways.full(h, weight, targets)
        return loss.detach(), 3 * loss

    monkeypatch.setattr(loss_command, "measure_once", here)
    monkeypatch.setitem(ways.WAYS, "torch", three_times)
    monkeypatch.setitem(ways.WAYS, "broken", three_times)
    shape = ["--batch", "2", "--length", "64", "--d_model", "8", "--vocab_size", "300", "--device", "cpu"]
    assert main(["loss", *shape, "--ways", "broken,full,torch,anlit", "--output", str(tmp_path)]) == 0
    rows = {row["way"]: row for row in json.loads((tmp_path / "loss.json").read_text())["rows"]}
    assert list(rows) == ["full", "broken", "torch", "anlit"]
    assert rows["full"]["loss"] == pytest.approx(6.2, abs=0.4)
    assert rows["full"]["error"] == 0
    assert rows["anlit"]["right"]
    assert rows["broken"]["reason"] == "RuntimeError: out of memory"
    assert rows["torch"]["error"] == pytest.approx(2, rel=1e-3)
    assert not rows["torch"]["right"]
    assert "(wrong)" in capsys.readouterr().out


def test_ways_are_put_beside_the_full_logits() -> None:
    full = {"loss": 1.0, "peak_bytes": 1000, "seconds": 1.0, "gradients": [[3.0, 4.0], [1.0]]}
    good = full | {"peak_bytes": 200, "gradients": [[3.0, 4.0001], [1.0]]}
    (_, row) = compare({"full": full, "anlit": good}, "float32")
    assert row["part_of_full"] == 0.2
    assert row["error"] == pytest.approx(2e-5)
    assert row["right"]
    assert not compare({"full": full, "anlit": good | {"gradients": [[3.0, 4.0], [1.1]]}}, "float32")[1]["right"]


def test_folded_models_beside_gpt_plus(tmp_path: Path, capsys) -> None:
    options = ["--layers", "1", "--heads", "2", "--width", "16", "--length", "8", "--vocab", "64", "--rounds", "2"]
    assert main(["folding", *options, "--device", "cpu", "--output", str(tmp_path)]) == 0
    models = json.loads((tmp_path / "folding.json").read_text())["models"]
    assert list(models) == ["GPT+", "nGPT", "nGPT, folded", "anGPT", "anGPT, folded"]
    assert all(len(one["values"]) == 2 for one in models.values())
    assert models["GPT+"]["beside_base"]["median"] == 1
    assert "anGPT, folded" in capsys.readouterr().out


def test_a_profile(tmp_path: Path, capsys) -> None:
    options = ["--preset", "cpu", *SHAPE, "--models", "anGPT", "--compiled", "no", "--steps", "2"]
    assert main(["profile", *options, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "profile-cpu.json").read_text())
    (row,) = record["rows"]
    assert set(row["groups"]) == set(GROUPS)
    assert all(row["groups"][group] > 0 for group in GROUPS)
    assert row["floors"].keys() == set(GROUPS) - {"rest"}
    assert sum(seconds for _, _, seconds in row["largest"]) <= sum(row["groups"].values()) * 1.001
    assert "norm restoration" in capsys.readouterr().out


def test_the_floor_is_counted_right() -> None:
    """d 16, f 64, L 2, V 64, N = 16 tokens, T = 8, four bytes a number."""
    gpt, angpt = (floors(OurStep(name, TINY, CPU), TINY, 1e9, 1e9) for name in ("GPT", "anGPT"))
    linear = 2 * (4 * 16 * 16 + 3 * 16 * 64) + 64 * 16
    assert gpt["matrix products"] == pytest.approx(6e-9 * linear * 16)
    assert gpt["attention"] == pytest.approx(1e-9 * 12 * 16 * 4.5 * 2 * 16)
    assert gpt["loss"] == pytest.approx(1e-9 * 4 * 64 * 4 * 16)
    assert gpt["elementwise"] == pytest.approx(1e-9 * 3 * 2 * (12 * 16 + 3 * 64) * 4 * 16)
    assert gpt["clipping"] == pytest.approx(3 / 7 * gpt["optimizer"])
    assert gpt["norm restoration"] == 0
    assert angpt["norm restoration"] == pytest.approx(8e-9 * (linear + 64 * 16))
    assert gpt["optimizer"] == pytest.approx(28e-9 * (linear + 64 * 16 + 2 * (2 * 16 + 2 * 8) + 16))


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (["aten::mm", "aten::matmul", "aten::linear", "anlit::pass", "Optimizer.step#AdamW.step"], "matrix products"),
        (["aten::mul", "anlit::pass", "Optimizer.step#AdamW.step"], "elementwise"),
        (["aten::_fused_adamw_", "Optimizer.step#AdamW.step"], "optimizer"),
        (["aten::add_", "Optimizer.step#AdamW.step"], "optimizer"),
        (["Optimizer.step#AdamW.step", "anlit::pass"], "rest"),
        (["aten::mul_", "anlit::clipping", "Optimizer.step#AdamW.step"], "clipping"),
        (["aten::div_", "anlit::norms"], "norm restoration"),
        (["aten::_log_softmax", "aten::log_softmax", "anlit::pass"], "loss"),
        (["aten::mul_", "LinearCrossEntropyBackward", "anlit::pass"], "loss"),
        (["aten::mm", "LinearCrossEntropyBackward", "anlit::pass"], "matrix products"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention"], "attention"),
        (["aten::bmm", "aten::matmul", "anlit::pass"], "matrix products"),
        (["void at::native::vectorized_elementwise_kernel<4>", "aten::mul", "autograd::engine"], "elementwise"),
        (["sm90_xmma_gemm_bf16", "aten::mm"], "matrix products"),
        (["autograd::engine::evaluate_function: MmBackward0", "anlit::pass"], "rest"),
    ],
)
def test_an_event_belongs_to_one_part(names: list[str], group: str) -> None:
    assert group_of(names) == group


def test_what_is_marked_is_found() -> None:
    x = torch.randn(64, 64)

    def step() -> None:
        marked(lambda: x * 2, "anlit::norms")()
        x @ x

    groups, largest = seconds_by_group(step, CPU, 2)
    assert groups["norm restoration"] > 0
    assert groups["matrix products"] > 0
    assert groups["elementwise"] < groups["norm restoration"]
    assert ["aten::mul", "norm restoration"] in [entry[:2] for entry in largest]
