"""The sections of a report: their numbers are those computed here from the same losses."""

import itertools
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from scipy import stats

from anlit.compare.statistics import Summary
from anlit.errors import UserError
from anlit.study.plan import Study
from anlit.study.report import write_report
from anlit.study.sections import loss_gap, trend, tuned_losses
from anlit.study.sections.registry import check_sections
from tests.study.conftest import ARMS, UNTUNED_ARMS, changed_study
from tests.study.reports import FINAL_LOSSES, report, results, trained, with_interval
from tests.study.synthetic import SHARE, curve_to

pytestmark = pytest.mark.usefixtures("unsaved")
TOKENS = 400 * 8 * 256


def choices(name: str, key: str, values: tuple[int, ...]) -> dict[str, Any]:
    """Named choices of a grid that set a key."""
    return {name: {value: {key: value} for value in values}}


SIZES = choices("d", "model.init_args.d_model", (64, 128, 256))


def steps(*numbers: int) -> dict[str, Any]:
    return choices("steps", "trainer.max_steps", numbers)


def test_trends(folder: Path) -> None:
    best_rates = {64: 0.4, 128: 0.2, 256: 0.1}

    def loss(run, values, parameters, tokens):
        distance = math.log2(values["lr"] / best_rates[values["d"]])
        return 3 + 0.1 * abs(distance) + 0.01 * values["seed"]

    arms = {"gpt": ARMS["gpt"] | {"vary": SIZES}}
    sections = [
        {"trend": {"value": "lr", "over": "parameters"}},
        {"trend": {"over": "parameters"}},
        {"trend": {"over": "d", "arms": ["gpt_d=64", "gpt_d=128"]}},
    ]

    page = report(trained(folder, loss, arms=arms, baseline=None, sections=sections))

    assert len(page.pictures) == 4, "a trend of rates has the losses of the tuning too"
    over_parameters, _, _, at_64, at_128 = page.rows_of("GPT+", 3)
    assert over_parameters[2] == "3.0200 ± 0.0100"
    assert at_64[1] == "64"
    assert at_128[1] == "128"
    log_sizes = np.log(list(map(n_parameters, best_rates)))
    log_rates = np.log(list(best_rates.values()))
    line = stats.linregress(log_sizes, log_rates)
    half_width = line.stderr * stats.t.ppf(0.975, 1)
    low = line.slope - half_width
    high = line.slope + half_width
    slope_cells = [f"{line.slope:.2f}", f"{low:.2f} … {high:.2f}"]
    assert page.row("GPT+", 4) == ["GPT+", "3", *slope_cells]


def test_losses_of_the_tuning_are_curves_over_the_tried_values(keep_figures) -> None:
    """The best value of each curve has a ring; a diverged loss is at the end of the axis."""
    figures = keep_figures(tuned_losses)
    narrow = {0.1: 3.2, 0.2: 3.0, 0.4: 3.1}
    wide = {0.1: 2.8, 0.2: 2.9, 0.4: 9.0}
    losses_by_width = {32: narrow, 64: wide}

    tuned_losses.draw_tuned_losses({"GPT+": losses_by_width}, "lr", "d_model", Path("a.png"))

    (axes,) = figures[0].axes
    curves = [line.get_xydata().tolist() for line in axes.lines]
    narrow_curve, narrow_ring, wide_curve, wide_ring = curves
    assert narrow_curve == [[0.1, 3.2], [0.2, 3.0], [0.4, 3.1]]
    assert narrow_ring == [[0.2, 3.0]]
    assert wide_ring == [[0.1, 2.8]]
    assert wide_curve[:2] == [[0.1, 2.8], [0.2, 2.9]]
    assert 3.2 < wide_curve[2][1] < axes.get_ylim()[1]


def test_a_setting_that_was_also_tried_at_zero_has_its_losses(folder: Path) -> None:
    """A logarithmic axis has no zero."""
    decays = {"model.init_args.weight_decay": [0.0, 0.1, 0.2]}
    arms = {"gpt": UNTUNED_ARMS["gpt"] | {"vary": SIZES, "tune": decays}}
    sections = [{"trend": {"value": "weight_decay", "over": "parameters"}}]

    def loss(run, values, parameters, tokens):
        return 3 + abs(values["weight_decay"] - 0.1)

    page = report(trained(folder, loss, arms=arms, baseline=None, sections=sections))

    assert "losses-weight_decay-parameters.png" in page.pictures


DECAYS = {"decay": {value: {"model.init_args.weight_decay": value} for value in (0.0, 0.1, 0.2)}}


def test_a_trend_of_values_at_zero_is_drawn_without_a_power_law(folder: Path) -> None:
    tuned = {"model.init_args.weight_decay": [0.0, 0.1]}
    arms = {"gpt": UNTUNED_ARMS["gpt"] | {"vary": SIZES, "tune": tuned}}
    sections = [{"trend": {"value": "weight_decay", "over": "parameters"}}]

    def loss(run, values, parameters, tokens):
        return 3 + values["weight_decay"]

    page = report(trained(folder, loss, arms=arms, baseline=None, sections=sections))

    assert "trend-weight_decay-parameters.png" in page.pictures
    assert "A power law needs three points, and none at 0." in page.text
    assert ["GPT+", "3"] not in [row[:2] for row in page.rows]


def test_a_trend_over_a_value_of_zero_has_its_point(keep_figures) -> None:
    series = {"GPT+": [(0.0, [3.0]), (0.1, [2.9]), (0.2, [3.1])]}

    figure = drawn_trend(keep_figures, series, "loss")

    left, right = figure.axes[0].get_xlim()
    assert left < 0 < 0.2 < right


def test_gaps_over_a_value_of_zero_have_its_point(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)
    arms = {name: UNTUNED_ARMS[name] | {"vary": DECAYS} for name in ("gpt", "angpt")}
    sections = [{"loss_gap": {"baseline": "gpt", "each": "decay", "over": "decay"}}]

    report(trained(folder, arms=arms, baseline=None, sections=sections, seeds=[1]))

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
    "GPT+": [(130e3, [0.016]), (1.31e6, [0.004])],
    "nGPT": [(132e3, [0.016]), (1.32e6, [0.008])],
}
FLOPS = np.array([1.5, 3.1, 4.8, 5.8, 10, 14, 19, 30, 48, 57, 101, 189]) * 1e11
LOSSES = {"GPT+": [(flops, [5 - flops / 1e13, 5.1]) for flops in FLOPS]}


def drawn_trend(keep_figures: Any, series: Any, value: str) -> Any:
    """The figure of a trend, with its layout made."""
    figures = keep_figures(trend)
    points = {}
    for label, line in series.items():
        points[label] = [(x, Summary(y)) for x, y in line]
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
    for left, right in itertools.pairwise(boxes):
        assert not left.overlaps(right)
    assert figure.get_figwidth() * 25.4 == pytest.approx(85, abs=0.2)
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(figure.axes[0].get_window_extent())


def test_arms_of_nearly_the_same_size_share_a_tick(keep_figures) -> None:
    figure = drawn_trend(keep_figures, RATES, "lr")

    assert [tick.get_text() for tick in ticks_of(figure)] == ["130k", "1.31M"]


def test_the_scaling_section_recovers_the_law(folder: Path) -> None:
    def loss(run, values, n, d):
        return 1.5 + 40 * n**-0.3 + 60 * d**-0.25

    arms = {"gpt": UNTUNED_ARMS["gpt"] | {"vary": SIZES | steps(100, 400, 1600)}}
    sections = [{"scaling": {"resamples": 20}}]

    page = report(trained(folder, loss, arms=arms, baseline=None, sections=sections, seeds=[1]))

    exponents = ["0.300", "0.250"]
    size_of_compute = f"{0.25 / (0.30 + 0.25):.3f}"
    loss_of_compute = f"{0.30 * 0.25 / (0.30 + 0.25):.3f}"
    irreducible_loss = "1.500"
    n_runs = "9"
    cells = [cell.split()[0] for cell in page.row("GPT+", 7)[1:]]
    assert cells == [*exponents, size_of_compute, loss_of_compute, irreducible_loss, n_runs]


def test_the_lead_of_an_arm_at_each_size_and_length(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)
    leads = {(64, 100): (0.5, 0.3), (64, 400): (-0.1, -0.2)}
    lost = (128, 100, 2)

    def loss(run, values, parameters, tokens):
        size = values["d"]
        length = values["steps"]
        seed = values["seed"]
        gpt_loss = 4.0 + 0.01 * seed
        if run.arm.base == "gpt":
            return gpt_loss
        if (size, length, seed) == lost:
            return math.nan
        return gpt_loss - leads.get((size, length), (0.1, 0.1))[seed - 1]

    options = {
        "arms": UNTUNED_ARMS,
        "shared": {"configs": ["common.yaml"], "vary": SIZES | steps(100, 400)},
        "sections": [{"loss_gap": {"baseline": "gpt", "each": "d"}}],
        "seeds": [1, 2],
        "baseline": None,
    }

    page = report(trained(folder, loss, **options))

    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles == ["d 64", "d 128", "d 256"]
    rows = [row for row in page.rows if row[2:3] == ["anGPT"]]
    panels, *_ = zip(*rows, strict=True)
    assert panels == ("64", "64", "128", "128", "256", "256")
    early, late, unpaired, *_ = rows
    tokens_of_step = 8 * 256
    assert early[1] == f"{100 * tokens_of_step / n_parameters(64):.3g}"
    assert late[1] == f"{400 * tokens_of_step / n_parameters(64):.3g}"
    interval = stats.ttest_1samp([-0.5, -0.3], 0).confidence_interval()
    assert early[3:5] == ["2", "4.0150 ± 0.0071"]
    assert early[5] == with_interval("+.4f", -0.4, *interval)
    assert float(early[6].split()[0]) > 1
    assert late[5].startswith("+0.1500")
    assert late[6] == "not reached"
    assert unpaired[3:] == ["1 of 2", "4.0150 ± 0.0071", "1 of 2 seeds", "1 of 2 seeds"]


OTHER_BLOCKS: dict[str, Any] = {"settings": {"data.init_args.val_blocks": 64}}
"""The loss of an arm with them is that of other tokens."""
APART = UNTUNED_ARMS | {"angpt": UNTUNED_ARMS["angpt"] | OTHER_BLOCKS}


def test_losses_on_other_tokens_have_no_gap(folder: Path, keep_figures) -> None:
    figures = keep_figures(loss_gap)

    def loss(run, values, parameters, tokens):
        return 3.4 if run.arm.base == "gpt" else 3.3

    options = {
        "arms": APART,
        "shared": {"configs": ["common.yaml"], "vary": SIZES},
        "sections": [{"loss_gap": {"baseline": "gpt", "each": "d"}}],
        "baseline": None,
    }

    page = report(trained(folder, loss, **options))

    rows = [row for row in page.rows if row[2:3] == ["anGPT"]]
    assert len(rows) == 3
    for row in rows:
        assert row[5:] == ["–", "– (validated differently)"]
    assert not figures
    assert not page.pictures


def onset_of(loss: float, level: float) -> float:
    """The tokens at which a synthetic run is at a level."""
    return float(np.interp(-level, -curve_to(loss), SHARE * TOKENS))


def onset_rows(folder: Path, level: float, after: int, baseline: str) -> list[list[str]]:
    section = {"onset": {"loss": level, "after": after, "baseline": baseline}}
    page = report(trained(folder, arms=UNTUNED_ARMS, sections=[section]))
    return [page.row("GPT+", 5), page.row("anGPT", 5)]


def test_the_onset_and_the_loss_after_it(folder: Path) -> None:
    gpt, angpt = onset_rows(folder, 4.3, 200_000, "gpt")

    gpt_onsets, gpt_losses = onsets_and_later_losses("gpt")
    angpt_onsets, angpt_losses = onsets_and_later_losses("angpt")
    check_onsets(gpt, gpt_onsets, gpt_losses)
    check_onsets(angpt, angpt_onsets, angpt_losses)
    assert gpt[2] == "–"
    assert gpt[4] == "–"
    assert angpt[2] == mean_with_t_interval((angpt_onsets - gpt_onsets) / 1e6)
    assert angpt[4] == mean_with_t_interval(angpt_losses - gpt_losses)


def onsets_and_later_losses(arm: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens at which each seed of an arm reaches 4.3, and its loss 200,000 tokens later."""
    onsets = []
    losses = []
    for final_loss in FINAL_LOSSES[arm].values():
        onset = onset_of(final_loss, 4.3)
        onsets.append(onset)
        losses.append(np.interp(onset + 200_000, SHARE * TOKENS, curve_to(final_loss)))
    return np.array(onsets), np.array(losses)


def check_onsets(row: list[str], onsets: np.ndarray, losses: np.ndarray) -> None:
    """Compare a row of the table with the onsets and later losses of its seeds."""
    shown_onsets = [float(cell.removesuffix("k")) for cell in row[1].split(", ")]
    assert shown_onsets == pytest.approx(onsets / 1e3, rel=5e-3)
    assert row[3] == f"{fmean(losses):.3f} ± {stdev(losses):.3f}"


def mean_with_t_interval(gaps: np.ndarray) -> str:
    interval = stats.ttest_1samp(gaps, 0).confidence_interval()
    return with_interval(".3f", gaps.mean(), *interval)


def test_a_level_that_one_seed_reaches_has_one_onset(folder: Path) -> None:
    gpt, _ = onset_rows(folder, 3.495, 1, "angpt")

    assert gpt[1].count("–") == 2
    assert gpt[2] == "1 of 3 seeds"


def test_onsets_by_losses_on_other_tokens_are_not_subtracted(folder: Path) -> None:
    section = {"onset": {"loss": 4.3, "after": 200_000, "baseline": "gpt"}}

    page = report(trained(folder, arms=APART, sections=[section]))

    assert page.row("anGPT", 5)[2::2] == ["– (validated differently)"] * 2


def test_a_trend_over_what_no_arm_varies_is_refused_before_a_run(folder: Path) -> None:
    arms = {
        "gpt": UNTUNED_ARMS["gpt"] | {"vary": SIZES},
        "angpt": UNTUNED_ARMS["angpt"] | {"vary": {"tau": [1]}},
    }

    def study_with(**options: object) -> Study:
        sections = [{"trend": {"over": "d", **options}}]
        return changed_study(folder, arms=arms, baseline=None, sections=sections)

    check_sections(study_with(arms=["gpt"]))

    message = r"over 'd', which is no number of arm 'angpt_tau=1': .* parameters, .*, tau"
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
    arms = UNTUNED_ARMS | {"gpt": UNTUNED_ARMS["gpt"] | {"vary": SIZES}}
    with pytest.raises(UserError, match=message):
        check_sections(changed_study(folder, arms=arms, baseline=None, sections=[section]))


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
            "over 'depth', which is no number of arm 'gpt': vary or tune it, or choose one of",
        ),
        (
            {"trend": {"over": "tokens", "value": "lr"}},
            "has value 'lr', which is no number of arm 'gpt': vary or tune it",
        ),
        (
            {"embed": {"name": "lenghts"}},
            "has the name 'lenghts', which is no command of `after`: choose one of lengths",
        ),
    ],
)
def test_mistakes_in_sections_are_told(folder: Path, section: Any, message: str) -> None:
    commands = {"lengths": "anlit lengths {runs} --output {output}"}
    study = trained(folder, arms=UNTUNED_ARMS, sections=[section], seeds=[1], after=commands)
    with pytest.raises(UserError, match=message):
        write_report(results(study))
