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
    "mechanism",
    [
        pytest.param(ScaleInvariant(), id="scale-invariant"),
        pytest.param(LogBias(), id="log bias"),
    ],
)
def test_all_ranges_far_beyond_tau_hold_the_same_weight(
    mechanism: Mechanism, t: int, delta: int
) -> None:
    """√e·τ·ln((1+Δt/τ)/(1+t/τ)), the integral; the sum over keys differs by a share of 1/t."""
    tau = 10
    end = delta * t
    ratio = (1 + end / tau) / (1 + t / tau)
    exact = math.sqrt(math.e) * tau * math.log(ratio)

    total = expected_total(for_single_head(mechanism), end, Range(t, end))

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

    weight_of_key = math.exp(gain**2 / 2)
    assert total == pytest.approx(n_keys * weight_of_key)


def test_a_range_beyond_the_window_has_no_weight() -> None:
    window = for_single_head(SlidingWindow(500, LOG_N))

    total = expected_total(window, 1000, Range(500, 1000))

    assert math.isnan(total)


@pytest.mark.parametrize("distances", [Range(0, 1), Range(1, 10), Range(10, 100)], ids=str)
@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(Plain(), id="plain"),
        pytest.param(ScaleInvariant(), id="scale-invariant"),
        pytest.param(SlidingWindow(60), id="window"),
    ],
)
def test_the_expected_weight_is_the_mean_over_draws(mechanism: Mechanism, distances: Range) -> None:
    """Within four standard errors of 20,000 draws."""
    single_head = for_single_head(mechanism)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 100, generator=generator, dtype=torch.float64)
    scale, m = distance_functions(single_head, 100, torch.float64)
    weights = (scale * scores + m).exp()
    totals = weights[:, distances.first : distances.end].sum(1)

    exact = expected_total(single_head, 100, distances)

    mean = totals.mean().item()
    error = totals.std().item() / math.sqrt(20_000)
    assert mean == pytest.approx(exact, abs=4 * error)
    assert error < 0.05 * exact


def test_plain_attention_spreads_over_all_keys() -> None:
    """Entropy is ln n − 1/2, and each range holds its share of the keys."""
    plain = for_single_head(Plain())

    result = measure_mechanism(plain, 10_000, draws=30, seed=0)
    another_seed = measure_mechanism(plain, 10_000, draws=30, seed=1)

    means = {name: estimate["mean"] for name, estimate in result.items()}
    entropy = math.log(10_000) - 0.5
    entropy_of_range = math.log(9000) - 0.5
    assert means["entropy"] == pytest.approx(entropy, abs=0.01)
    assert means["entropy_1000_to_10000"] == pytest.approx(entropy_of_range, abs=0.01)
    assert means["weight_1000_to_10000"] == pytest.approx(0.9, abs=0.01)
    assert another_seed["entropy"] != result["entropy"]


def test_ranges_of_distances_end_within_the_keys() -> None:
    of_1999_keys = distance_ranges(1999, 2)
    of_2000_keys = distance_ranges(2000, 2)

    assert of_1999_keys == [Range(1, 2), Range(10, 20), Range(100, 200)]
    assert of_2000_keys == [*of_1999_keys, Range(1000, 2000)]
    assert distance_ranges(99, 100) == []


@pytest.mark.parametrize("name", ["Plane", "AttentionPattern"])
def test_a_name_without_default_arguments_is_refused(name: str) -> None:
    message = f"--mechanisms '{name}' is not a mechanism with default arguments: .*Plain"
    with pytest.raises(UserError, match=message):
        build_mechanisms([name])


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The arguments for two mechanisms at three lengths."""
    return [
        "diagnose",
        "--gaussian",
        "--mechanisms=Plain, SlidingWindow",
        "--lengths=1,20,200",
        "--draws=3",
        "--seed=5",
        f"--output={tmp_path}",
    ]


def test_the_command_writes_numbers_report_and_figure(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command)

    record: dict[str, Any] = json.loads((tmp_path / "gaussian.json").read_text())
    assert record["draws"] == 3
    assert record["seed"] == 5
    assert record["command"].startswith("anlit diagnose --gaussian")
    plain = record["mechanisms"]["Plain"]
    window = record["mechanisms"]["SlidingWindow"]
    assert plain["1"]["entropy"] == {"mean": 0, "standard_error": 0}
    assert window["200"]["attention_sink"]["mean"] is None
    report = (tmp_path / "report.md").read_text()
    assert "n = 200" in report
    assert "| Plain | 4" in report
    assert "| SlidingWindow |" in report
    assert "ranges.png" in report
    assert "seed 5" in report
    assert (tmp_path / "ranges.png").stat().st_size > 10_000
    assert "Independent normal scores, n = 200 keys" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_the_report_of_another_command_is_not_replaced(command: list[str], tmp_path: Path) -> None:
    main(command)
    main(command)  # the command replaces its earlier report
    # `anlit compare` writes this file.
    (tmp_path / "gaussian.json").rename(tmp_path / "convergence.json")

    message = r"has another report \(anlit diagnose .*: give another folder, or remove"
    with pytest.raises(UserError, match=message):
        main(command)


def test_normal_scores_need_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--gaussian takes no checkpoint"):
        main(["diagnose", "--gaussian", "somewhere", f"--output={tmp_path}"])
