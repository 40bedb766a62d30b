"""`anlit diagnose --gaussian`: sampled statistics against what is known of independent normal scores."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from anlit import LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.commands.evaluations import main
from anlit.errors import UserError
from anlit.evaluation.gaussian import build_mechanisms, expected_total, measure_mechanism
from anlit.nn.attention.statistics import Range
from anlit.nn.mechanisms.mechanism import Mechanism


def layer(mechanism: Mechanism) -> Mechanism:
    return mechanism.for_layer(1, 64, 0)


@pytest.mark.parametrize("t", [100, 1_000, 10_000])
@pytest.mark.parametrize(
    "mechanism", [ScaleInvariant(), LogBias()], ids=["scale-invariant", "log bias"]
)
def test_every_decade_of_distances_holds_the_same_weight(mechanism: Mechanism, t: int) -> None:
    """√e·τ·ln((1+10t/τ)/(1+t/τ)), the integral; the sum over keys is that but for a share of 1/t."""
    exact = math.sqrt(math.e) * 10 * math.log((1 + 10 * t / 10) / (1 + t / 10))
    assert expected_total(layer(mechanism), 10 * t, Range(t, 10 * t)) == pytest.approx(
        exact, rel=1 / t
    )


def test_expected_weight_of_other_mechanisms() -> None:
    """9t keys of weight e^{g²/2}; the window of 500 hides the rest, and a range beyond it has none."""
    log_n = LogN(s=0.5, learned="never")
    assert expected_total(layer(Plain()), 1000, Range(100, 1000)) == pytest.approx(
        900 * math.sqrt(math.e)
    )
    window = layer(SlidingWindow(500, log_n))
    for given, n, keys in ((layer(log_n), 1000, 900), (window, 500, 400)):
        weight = math.exp((0.5 * math.log(n)) ** 2 / 2)
        assert expected_total(given, 1000, Range(100, 1000)) == pytest.approx(keys * weight)
    assert math.isnan(expected_total(window, 1000, Range(500, 1000)))


@pytest.mark.parametrize(
    "mechanism", [Plain(), ScaleInvariant(), SlidingWindow(60)], ids=["plain", "s-i", "window"]
)
def test_samples_agree_with_sums(mechanism: Mechanism) -> None:
    """Total weight in each range, within four standard errors."""
    own = measure_mechanism(layer(mechanism), 100, draws=4000, seed=0)
    for span in ("0_to_1", "1_to_10", "10_to_100"):
        sampled, exact = own[f"total_{span}"], own[f"expected_total_{span}"]["mean"]
        assert sampled["mean"] == pytest.approx(exact, abs=4 * sampled["standard_error"]), span
        assert sampled["standard_error"] < 0.05 * exact


def test_plain_attention_spreads_over_all_keys() -> None:
    """Entropy ln n − 1/2, and each range holds its share of the keys: that is where weight grows with distance."""
    own = measure_mechanism(layer(Plain()), 10_000, draws=30, seed=0)
    assert own["entropy"]["mean"] == pytest.approx(math.log(10_000) - 0.5, abs=0.01)
    assert own["weight_1000_to_10000"]["mean"] == pytest.approx(0.9, abs=0.01)
    assert own["entropy_1000_to_10000"]["mean"] == pytest.approx(math.log(9000) - 0.5, abs=0.01)
    assert measure_mechanism(layer(Plain()), 10_000, draws=30, seed=1)["entropy"] != own["entropy"]


@pytest.mark.parametrize("name", ["Plane", "AttentionPattern"])
def test_mechanisms_that_are_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=f"--mechanisms '{name}' is no mechanism with default arguments: .*Plain"
    ):
        build_mechanisms([name])


def test_the_command_writes_numbers_report_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--mechanisms=Plain, SlidingWindow", "--lengths=1,20,200", "--draws=3", "--seed=5"]
    for _ in range(2):  # over its own earlier report
        main(["diagnose", "--gaussian", *arguments, f"--output={tmp_path}"])
    record: dict[str, Any] = json.loads((tmp_path / "gaussian.json").read_text())
    assert (record["draws"], record["seed"]) == (3, 5)
    assert record["command"].startswith("anlit diagnose --gaussian")
    assert record["mechanisms"]["Plain"]["1"]["entropy"] == {"mean": 0, "standard_error": 0}
    assert record["mechanisms"]["SlidingWindow"]["200"]["attention_sink"]["mean"] is None
    report = (tmp_path / "report.md").read_text()
    for part in ("n = 200", "| Plain | 4", "| SlidingWindow |", "ranges.png", "seed 5"):
        assert part in report
    assert (tmp_path / "ranges.png").stat().st_size > 10_000
    assert "Independent normal scores, n = 200 keys" in capsys.readouterr().out
    with pytest.raises(UserError, match="--gaussian takes no checkpoint"):
        main(["diagnose", "--gaussian", "somewhere", f"--output={tmp_path}"])
    (tmp_path / "gaussian.json").rename(
        tmp_path / "convergence.json"
    )  # as if `anlit compare` had written it
    with pytest.raises(
        UserError, match=r"has another report \(anlit diagnose .*: give another folder, or remove"
    ):
        main(["diagnose", "--gaussian", *arguments, f"--output={tmp_path}"])
