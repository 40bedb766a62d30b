"""`anlit diagnose --gaussian`: sampled statistics against exact values of independent scores."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit import LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.commands.evaluations import main
from anlit.errors import UserError
from anlit.evaluation.gaussian import (
    DELTAS,
    build_mechanisms,
    distance_functions,
    distance_ranges,
    expected_total,
    measure_mechanism,
)
from anlit.nn.attention.statistics import Range
from anlit.nn.mechanisms.mechanism import Mechanism


def for_single_head(mechanism: Mechanism) -> Mechanism:
    return mechanism.for_layer(1, 64, 0)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("t", [100, 1_000, 10_000])
@pytest.mark.parametrize(
    "mechanism", [ScaleInvariant(), LogBias()], ids=["scale-invariant", "log bias"]
)
def test_all_ranges_far_beyond_tau_hold_the_same_weight(
    mechanism: Mechanism, t: int, delta: int
) -> None:
    """√e·τ·ln((1+Δt/τ)/(1+t/τ)), the integral; the sum over keys differs by a share of 1/t."""
    tau = 10
    exact = math.sqrt(math.e) * tau * math.log((1 + delta * t / tau) / (1 + t / tau))

    total = expected_total(for_single_head(mechanism), delta * t, Range(t, delta * t))

    assert total == pytest.approx(exact, rel=1 / t)


LOG_N = LogN(s=0.5, learned="never")


@pytest.mark.parametrize(
    ("mechanism", "gain", "n_keys"),
    [
        pytest.param(Plain(), 1.0, 900, id="plain"),
        pytest.param(LOG_N, 0.5 * math.log(1000), 900, id="log n"),
        pytest.param(SlidingWindow(500, LOG_N), 0.5 * math.log(500), 400, id="window of 500"),
    ],
)
def test_the_expected_weight_of_a_range_is_the_number_of_visible_keys_times_a_keys_weight(
    mechanism: Mechanism, gain: float, n_keys: int
) -> None:
    """A key has the weight e^{g²/2}. The range is [100, 1000)."""
    total = expected_total(for_single_head(mechanism), 1000, Range(100, 1000))

    assert total == pytest.approx(n_keys * math.exp(gain**2 / 2))


def test_a_range_beyond_the_window_has_no_weight() -> None:
    window = for_single_head(SlidingWindow(500, LOG_N))

    assert math.isnan(expected_total(window, 1000, Range(500, 1000)))


@pytest.mark.parametrize(
    "mechanism", [Plain(), ScaleInvariant(), SlidingWindow(60)], ids=["plain", "s-i", "window"]
)
def test_the_expected_weight_is_the_mean_over_draws(mechanism: Mechanism) -> None:
    """Within four standard errors of 20,000 draws, by distance."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 100, generator=generator, dtype=torch.float64)
    single_head = for_single_head(mechanism)
    scale, m = distance_functions(single_head, 100, torch.float64)
    weights = (scale * scores + m).exp()

    for span in (Range(0, 1), Range(1, 10), Range(10, 100)):
        totals = weights[:, span.first : span.end].sum(1)
        error = totals.std().item() / math.sqrt(20_000)
        exact = expected_total(single_head, 100, span)
        assert totals.mean().item() == pytest.approx(exact, abs=4 * error), span
        assert error < 0.05 * exact


def test_plain_attention_spreads_over_all_keys() -> None:
    """Entropy is ln n − 1/2, and each range holds its share of the keys."""
    plain = for_single_head(Plain())

    result = measure_mechanism(plain, 10_000, draws=30, seed=0)
    another_seed = measure_mechanism(plain, 10_000, draws=30, seed=1)

    assert result["entropy"]["mean"] == pytest.approx(math.log(10_000) - 0.5, abs=0.01)
    assert result["weight_1000_to_10000"]["mean"] == pytest.approx(0.9, abs=0.01)
    assert result["entropy_1000_to_10000"]["mean"] == pytest.approx(math.log(9000) - 0.5, abs=0.01)
    assert another_seed["entropy"] != result["entropy"]


def test_ranges_of_distances_end_within_the_keys() -> None:
    assert distance_ranges(1999, 2) == [Range(1, 2), Range(10, 20), Range(100, 200)]
    assert distance_ranges(2000, 2)[-1] == Range(1000, 2000)
    assert distance_ranges(99, 100) == []


@pytest.mark.parametrize("name", ["Plane", "AttentionPattern"])
def test_a_name_without_default_arguments_is_refused(name: str) -> None:
    message = f"--mechanisms '{name}' is no mechanism with default arguments: .*Plain"
    with pytest.raises(UserError, match=message):
        build_mechanisms([name])


OPTIONS = ["--mechanisms=Plain, SlidingWindow", "--lengths=1,20,200", "--draws=3", "--seed=5"]


def test_the_command_writes_numbers_report_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["diagnose", "--gaussian", *OPTIONS, f"--output={tmp_path}"]

    main(command)

    record: dict[str, Any] = json.loads((tmp_path / "gaussian.json").read_text())
    assert (record["draws"], record["seed"]) == (3, 5)
    assert record["command"].startswith("anlit diagnose --gaussian")
    results = record["mechanisms"]
    assert results["Plain"]["1"]["entropy"] == {"mean": 0, "standard_error": 0}
    assert results["SlidingWindow"]["200"]["attention_sink"]["mean"] is None
    report = (tmp_path / "report.md").read_text()
    for text in ("n = 200", "| Plain | 4", "| SlidingWindow |", "ranges.png", "seed 5"):
        assert text in report
    assert (tmp_path / "ranges.png").stat().st_size > 10_000
    assert "Independent normal scores, n = 200 keys" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_the_report_of_another_command_is_not_replaced(tmp_path: Path) -> None:
    command = ["diagnose", "--gaussian", *OPTIONS, f"--output={tmp_path}"]
    main(command)
    main(command)  # it may replace its own report
    # `anlit compare` writes this file.
    (tmp_path / "gaussian.json").rename(tmp_path / "convergence.json")

    message = r"has another report \(anlit diagnose .*: give another folder, or remove"
    with pytest.raises(UserError, match=message):
        main(command)


def test_normal_scores_need_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--gaussian takes no checkpoint"):
        main(["diagnose", "--gaussian", "somewhere", f"--output={tmp_path}"])
