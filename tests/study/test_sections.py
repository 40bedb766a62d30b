"""The sections of a report: their numbers are those computed here from the same losses."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from anlit.compare.statistics import Summary
from anlit.errors import UserError
from anlit.reporting.figure import LineStyle
from anlit.study.plan import Study
from anlit.study.report import write_report
from anlit.study.sections import loss_gap, trend, tried_losses
from anlit.study.sections.axes import loss_range
from anlit.study.sections.dynamics import columns_of_metrics
from anlit.study.sections.registry import check_sections
from tests.compare.reports import t_interval
from tests.study.conftest import (
    ANGPT_ARM,
    ARMS_ON_OTHER_TOKENS,
    GPT_ARM,
    TUNE,
    UNTUNED_ARMS,
    arms_with,
    changed_study,
)
from tests.study.reports import (
    report,
    report_with,
    results,
    trained,
    with_interval,
)

pytestmark = pytest.mark.usefixtures("unsaved")
TOKENS = 400 * 8 * 256
PER_PARAMETER = "tokens per parameter"
GAP = "minus the baseline's (95 %)"


WEIGHT_DECAY = "model.init_args.weight_decay"


def choices(name: str, key: str, *values: float) -> dict[str, Any]:
    """Named choices of a grid that set a key."""
    return {name: {value: {key: value} for value in values}}


SIZES = choices("d", "model.init_args.d_model", 64, 128, 256)


def steps(*numbers: int) -> dict[str, Any]:
    return choices("steps", "trainer.max_steps", *numbers)


def test_trends(folder: Path) -> None:
    best_rates = {64: 0.4, 128: 0.2, 256: 0.1}

    def loss(run, values, parameters, tokens):
        distance = math.log2(values["lr"] / best_rates[values["d"]])
        return 3 + 0.1 * abs(distance) + 0.01 * values["seed"]

    arms = {"gpt": GPT_ARM | {"vary": SIZES, "tune": TUNE}}
    sections = [
        {"trend": {"value": "lr", "over": "parameters"}},
        {"trend": {"over": "parameters"}},
        {"trend": {"over": "d", "arms": ["gpt_d=64", "gpt_d=128"]}},
    ]

    study = trained(folder, loss, arms=arms, baseline=None, sections=sections)

    page = report(study)

    assert len(page.pictures) == 4, "a trend of rates has the losses of the tuning too"
    smallest, _, _ = page.rows_of("GPT+", "parameters")
    assert smallest["validation loss (nats/token)"] == "3.0200 ± 0.0100"
    widths = [row["d"] for row in page.rows_of("GPT+", "d")]
    assert widths == ["64", "128"]
    check_power_law(page.row("GPT+", "exponent b"), best_rates)


def check_power_law(row: dict[str, str], best_rates: dict[int, float]) -> None:
    """Compare a row with the line through the logarithms of sizes and rates."""
    log_sizes = np.log(list(map(n_parameters, best_rates)))
    log_rates = np.log(list(best_rates.values()))
    line = stats.linregress(log_sizes, log_rates)
    half_width = line.stderr * stats.t.ppf(0.975, 1)
    low = line.slope - half_width
    high = line.slope + half_width
    assert row["points"] == "3"
    assert line.slope < 0
    assert row["exponent b"] == f"−{-line.slope:.2f}"
    assert row["95 % interval"] == f"−{-low:.2f} … −{-high:.2f}"


def test_losses_of_the_tuning_are_curves_over_the_tried_values(keep_figures) -> None:
    """The best value of each curve has a ring. A diverged loss is at the end of the axis."""
    figures = keep_figures(tried_losses)
    narrow = {0.1: 3.2, 0.2: 3.0, 0.4: 3.1}
    wide = {0.1: 2.8, 0.2: 2.9, 0.4: 9.0}
    panel = tried_losses.Panel("GPT+", "lr", {"32": narrow, "64": wide}, list(narrow))
    styles = {"32": LineStyle("black", "o", "-"), "64": LineStyle("grey", "s", "-")}

    tried_losses.draw_losses([panel], styles, Path("a.png"))

    (axes,) = figures[0].axes
    curves = [line.get_xydata().tolist() for line in axes.lines]
    narrow_curve, narrow_ring, wide_curve, wide_ring = curves
    assert dict(narrow_curve) == narrow
    assert narrow_ring == [[0.2, 3.0]]
    assert wide_ring == [[0.1, 2.8]]
    *finite_points, (_, end_of_axis) = wide_curve
    _, top = axes.get_ylim()
    assert finite_points == [[0.1, 2.8], [0.2, 2.9]]
    assert 3.2 < end_of_axis < top


@pytest.mark.parametrize(
    ("losses", "limits"),
    [
        pytest.param([2.0, 2.0, 2.0, 2.2, 2.4], (2.0, 2.4), id="half of them the lowest"),
        pytest.param([2.0, 2.0, 2.0, 2.0, 2.1, 2.1, 9.0], (2.0, 2.3), id="and one far above"),
        pytest.param([2.0, 2.0], (2.0, 2.0), id="all equal"),
    ],
)
def test_an_axis_of_losses_tells_apart_those_above_a_repeated_lowest(
    losses: list[float], limits: tuple[float, float]
) -> None:
    assert loss_range(losses) == pytest.approx(limits)


def test_a_setting_that_was_also_tried_at_zero_has_its_losses(folder: Path) -> None:
    """A logarithmic axis has no zero."""
    arm = GPT_ARM | {"vary": SIZES, "tune": {WEIGHT_DECAY: [0.0, 0.1, 0.2]}}
    section = {"trend": {"value": "weight_decay", "over": "parameters"}}

    def loss(run, values, parameters, tokens):
        return 3 + abs(values["weight_decay"] - 0.1)

    page = report_with(section, folder, loss, arms={"gpt": arm})

    assert "losses-weight_decay-parameters.png" in page.pictures


def test_a_trend_of_values_at_zero_is_drawn_without_a_power_law(folder: Path) -> None:
    arm = GPT_ARM | {"vary": SIZES, "tune": {WEIGHT_DECAY: [0.0, 0.1]}}
    section = {"trend": {"value": "weight_decay", "over": "parameters"}}

    def loss(run, values, parameters, tokens):
        return 3 + values["weight_decay"]

    page = report_with(section, folder, loss, arms={"gpt": arm})

    assert "trend-weight_decay-parameters.png" in page.pictures
    assert "A power law needs three points, and none at 0." in page.text
    assert not page.table("exponent b")


def test_a_trend_over_a_value_of_zero_has_its_point(keep_figures) -> None:
    series = {"GPT+": {0.0: [3.0], 0.1: [2.9], 0.2: [3.1]}}

    figure = drawn_trend(keep_figures, series, "loss")

    left, right = figure.axes[0].get_xlim()
    assert left < 0 < 0.2 < right


def test_gaps_over_a_value_of_zero_have_its_point(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)
    arms = arms_with(vary=choices("decay", WEIGHT_DECAY, 0.0, 0.1, 0.2))
    section = {"loss_gap": {"baseline": "gpt", "each": "decay", "over": "decay"}}

    report_with(section, folder, arms=arms, seeds=[1])

    left, right = figures[0].axes[0].get_xlim()
    assert left < 0 < right


def test_a_section_that_fails_says_why_and_leaves_the_rest_of_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("no figure")

    monkeypatch.setattr(trend, "draw_trend", fail)
    sections = [{"trend": {"over": "parameters"}}, "convergence"]

    page = report(trained(folder, arms=UNTUNED_ARMS, sections=sections, seeds=[1]))

    sentence = "This section could not be made: unforeseen ZeroDivisionError (no figure) at"
    assert sentence in page.text
    assert "## Failures" in page.text
    assert "1-convergence.png" in page.pictures
    assert "the section 'trend' could not be made: unforeseen Zero" in capsys.readouterr().err


def n_parameters(d: int) -> int:
    """The parameters of the study's models with four layers and 1024 tokens, of width d."""
    return 2 * 1024 * d + 4 * 16 * d * d


RATES = {
    "GPT+": {130e3: [0.016], 1.31e6: [0.004]},
    "nGPT": {132e3: [0.016], 1.32e6: [0.008]},
}
FLOPS = np.array([1.5, 3.1, 4.8, 5.8, 10, 14, 19, 30, 48, 57, 101, 189]) * 1e11
LOSSES = {"GPT+": {flops: [5 - flops / 1e13, 5.1] for flops in FLOPS}}


def drawn_trend(keep_figures: Any, series: Any, value: str) -> Any:
    """The figure of a trend, with its layout made."""
    figures = keep_figures(trend)
    points = {}
    for label, line in series.items():
        points[label] = [(x, Summary(y)) for x, y in line.items()]
    trend.draw_trend(points, "parameters", value, Path("a.png"), {})
    (figure,) = figures
    figure.draw_without_rendering()
    return figure


def ticks_of(figure: Any) -> list[Any]:
    """The texts below the x axis that can be seen."""
    ticks = []
    for tick in figure.axes[0].get_xticklabels():
        if tick.get_text() and tick.get_visible():
            ticks.append(tick)
    return ticks


@pytest.mark.parametrize(("series", "value"), [(RATES, "lr"), (LOSSES, "loss")])
def test_a_trend_fits_a_column_and_its_ticks_do_not_overlap(
    keep_figures, series, value: str
) -> None:
    figure = drawn_trend(keep_figures, series, value)

    boxes = [tick.get_window_extent() for tick in ticks_of(figure)]
    assert len(boxes) > 1
    for left, right in itertools.pairwise(boxes):
        assert not left.overlaps(right)
    millimetres = figure.get_figwidth() * 25.4
    assert millimetres == pytest.approx(85, abs=0.2)
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(figure.axes[0].get_window_extent())


def test_arms_of_nearly_the_same_size_share_a_tick(keep_figures) -> None:
    figure = drawn_trend(keep_figures, RATES, "lr")

    texts = [tick.get_text() for tick in ticks_of(figure)]
    assert texts == ["130k", "1.31M"]


def test_the_scaling_section_recovers_the_law(folder: Path) -> None:
    def loss(run, values, n, d):
        return 1.5 + 40 * n**-0.3 + 60 * d**-0.25

    arm = GPT_ARM | {"vary": SIZES | steps(100, 400, 1600)}
    section = {"scaling": {"resamples": 20}}

    page = report_with(section, folder, loss, arms={"gpt": arm}, seeds=[1])

    row = page.row("GPT+", "a (of N)")
    values = {column: cell.split()[0] for column, cell in row.items()}
    assert values["a (of N)"] == "0.300"
    assert values["b (of D)"] == "0.250"
    assert values["N ∝ C^"] == f"{0.25 / (0.30 + 0.25):.3f}"
    assert values["L(C) − E ∝ C^−"] == f"{0.30 * 0.25 / (0.30 + 0.25):.3f}"
    assert values["E"] == "1.500"
    assert values["runs"] == "9"


def test_the_lead_of_an_arm_at_each_size_and_length(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)
    leads = {
        "d=64_steps=100_seed=1": 0.5,
        "d=64_steps=100_seed=2": 0.3,
        "d=64_steps=400_seed=1": -0.1,
        "d=64_steps=400_seed=2": -0.2,
        "d=128_steps=100_seed=2": math.nan,
    }
    lead_of_others = 0.1

    def loss(run, values, parameters, tokens):
        gpt_loss = 4.0 + 0.01 * values["seed"]
        if run.arm.base == "gpt":
            return gpt_loss
        name = "d={d}_steps={steps}_seed={seed}".format(**values)
        return gpt_loss - leads.get(name, lead_of_others)

    section = {"loss_gap": {"baseline": "gpt", "each": "d"}}
    arms = arms_with(vary=SIZES | steps(100, 400))

    page = report_with(section, folder, loss, arms=arms, seeds=[1, 2])

    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles == ["d 64", "d 128", "d 256"]
    rows = page.table("baseline's loss")
    assert [row["arm"] for row in rows] == ["anGPT"] * 6
    assert [row["d"] for row in rows] == ["64", "64", "128", "128", "256", "256"]
    early, late, unpaired, *_ = rows
    tokens_of_step = 8 * 256
    assert early[PER_PARAMETER] == f"{100 * tokens_of_step / n_parameters(64):.3g}"
    assert late[PER_PARAMETER] == f"{400 * tokens_of_step / n_parameters(64):.3g}"
    low, high = t_interval([-0.5, -0.3])
    assert early["seeds"] == "2"
    assert early["baseline's loss"] == "4.0150 ± 0.0071"
    assert early[GAP] == with_interval("+.4f", -0.4, low, high)
    speedup, *_ = early["speed-up, tokens"].split()
    assert float(speedup) > 1
    assert late[GAP].startswith("+0.1500")
    assert late["speed-up, tokens"] == "not reached"
    assert unpaired["seeds"] == "1 of 2"
    assert unpaired["baseline's loss"] == "4.0150 ± 0.0071"
    assert unpaired[GAP] == "1 of 2 seeds"
    assert unpaired["speed-up, tokens"] == "1 of 2 seeds"


def test_losses_on_other_tokens_have_no_gap(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)

    def loss(run, values, parameters, tokens):
        return {"gpt": 3.4, "angpt": 3.3}[run.arm.base]

    section = {"loss_gap": {"baseline": "gpt", "each": "d"}}
    shared = {"configs": ["common.yaml"], "vary": SIZES}

    page = report_with(section, folder, loss, arms=ARMS_ON_OTHER_TOKENS, shared=shared)

    rows = page.table("baseline's loss")
    assert len(rows) == 3
    for row in rows:
        assert row["arm"] == "anGPT"
        assert row[GAP] == "–"
        assert row["speed-up, tokens"] == "– (validated differently)"
    assert not figures
    assert not page.pictures


def test_a_trend_over_what_no_arm_varies_is_refused_before_a_run(folder: Path) -> None:
    arms = {
        "gpt": GPT_ARM | {"vary": SIZES},
        "angpt": ANGPT_ARM | {"vary": {"tau": [1]}},
    }

    def study_with(**options: object) -> Study:
        sections = [{"trend": {"over": "d", **options}}]
        return changed_study(folder, arms=arms, baseline=None, sections=sections)

    check_sections(study_with(arms=["gpt"]))

    message = r"over 'd', which is not a number of arm 'angpt_tau=1': .* parameters, .*, tau"
    with pytest.raises(UserError, match=message):
        check_sections(study_with())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"onset": {"loss": 4.3, "after": 1, "baseline": "gpt"}},
            "has the baseline 'gpt', which is none of gpt_d=64, gpt_d=128, gpt_d=256, angpt",
        ),
        (
            {"loss_gap": {"baseline": "gpt_d=64", "each": "d"}},
            "has the baseline 'gpt_d=64', which is none of gpt, angpt",
        ),
    ],
)
def test_the_baseline_of_a_section_is_an_arm_or_all_its_points(
    folder: Path, section: Any, message: str
) -> None:
    arms = {"gpt": GPT_ARM | {"vary": SIZES}, "angpt": ANGPT_ARM}
    study = changed_study(folder, arms=arms, baseline=None, sections=[section])

    with pytest.raises(UserError, match=message):
        check_sections(study)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"loss_gap": {"baseline": "gpt"}},
            "the section 'loss_gap' of study.yaml lacks the option 'each'",
        ),
        (
            {"loss_gap": {"baseline": "gpt", "each": "lr", "arms": []}},
            "has the unknown key 'arms': the known ones are",
        ),
        (
            {"onset": {"loss": "4.3", "after": 1, "baseline": "gpt"}},
            "loss is str in place of int or float",
        ),
        ({"tuning": 3}, "the section 'tuning' of study.yaml is not .* is int in place of dict"),
        (
            {"loss_gap": {"baseline": "other", "each": "lr"}},
            "has the baseline 'other', which is none of gpt, angpt",
        ),
        (
            {"loss_gap": {"baseline": "gpt", "each": "size"}},
            "each 'size', which arm 'gpt' does not vary: choose",
        ),
        (
            {"dynamics": {"arms": ["gpt", "bert"]}},
            "names the arm 'bert', which is none of gpt, angpt",
        ),
        (
            {"trend": {"over": "depth"}},
            "over 'depth', which is not a number of arm 'gpt': vary or tune it, or choose one of",
        ),
        (
            {"trend": {"over": "tokens", "value": "lr"}},
            "has value 'lr', which is not a number of arm 'gpt': vary or tune it",
        ),
        (
            {"embed": {"name": "lenghts"}},
            "has the name 'lenghts', which is not a command of `after`: choose one of lengths",
        ),
    ],
)
def test_mistakes_in_sections_are_told(folder: Path, section: Any, message: str) -> None:
    commands = {"lengths": "anlit lengths {runs} --output {output}"}
    study = trained(folder, arms=UNTUNED_ARMS, sections=[section], seeds=[1], after=commands)

    with pytest.raises(UserError, match=message):
        write_report(results(study))


def test_the_deepest_layer_of_a_model_of_a_hundred_layers_is_found() -> None:
    columns = columns_of_metrics(["step", "hidden/layer_99/norm", "hidden/layer_125/norm"])

    assert columns["hidden/last/norm"] == "hidden/layer_125/norm"
