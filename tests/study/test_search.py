"""Draws over ranges: their values, their number in a study, their table in the report."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import qmc

from anlit.errors import UserError
from anlit.study.estimate import describe_plan
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from anlit.study.report import print_summary, write_report
from anlit.study.results import read_results
from anlit.study.search import Search, draw_points
from tests.study.conftest import (
    GPT_ARM,
    UNTUNED_ARMS,
    Launch,
    arms_with,
    attributes,
    changed_study,
    write_study,
)
from tests.study.synthetic import train
from tests.study.test_launch import finish, started_runs

RATE = "model.init_args.lr"
Lines = dict[str, Any]
"""The lines of `tune`: setting → its range, or the values that are drawn."""
LOG = {"low": 0.05, "high": 0.8, "scale": "log"}
SEARCHED = {
    "arms": UNTUNED_ARMS,
    "shared": {"configs": ["common.yaml"], "tune": {RATE: LOG}},
}
LINES = {
    "model.lr": {"low": 1.0e-3, "high": 3.0e-2, "scale": "log"},
    "model.warmup": {"low": 0.0, "high": 0.4},
    "model.norm": [True, False],
}


RATE_ARM = {"configs": ["gpt.yaml"], "tune": {RATE: LOG}}


def draw(lines: Lines, draws: int, method: str = "sobol", seed: int = 0) -> Any:
    """The points of a search over some lines."""
    points, _ = draw_points(lines, Search(method, draws, seed), "here")
    return points


def labels(points: Any) -> list[str]:
    """The settings of each draw in words."""
    return attributes(points, "label")


def values(lines: Lines, name: str, draws: int) -> list[Any]:
    """The value of a setting in each draw by Sobol."""
    return [point.shown[name] for point in draw(lines, draws)]


def searched(folder: Path, draws: int = 8, **changes: Any) -> Study:
    """The study with two arms that draw the rate, with the changes."""
    search = {"method": "sobol", "draws": draws}
    return changed_study(folder, **SEARCHED | {"search": search} | changes)


@pytest.mark.parametrize("method", ["sobol", "random"])
@pytest.mark.parametrize("fewer", [1, 5, 8])
def test_further_draws_keep_the_earlier(method: str, fewer: int) -> None:
    draws = labels(draw(LINES, 16, method))
    fewer_draws = labels(draw(LINES, fewer, method))

    assert len(set(draws)) == 16
    assert fewer_draws == draws[:fewer]


def test_draws_are_scipys_points_on_the_scales_of_the_ranges() -> None:
    sampler = qmc.Sobol(3, scramble=True, rng=np.random.default_rng(7))
    shares = sampler.random(16)

    points = draw(LINES, 16, seed=7)

    for share, point in zip(shares.tolist(), points, strict=True):
        share_of_lr, share_of_norm, share_of_warmup = share
        lr = 1e-3 * 30**share_of_lr
        assert point.settings["model.lr"] == pytest.approx(lr, rel=5e-3)
        warmup = 0.4 * share_of_warmup
        assert point.settings["model.warmup"] == pytest.approx(warmup, abs=5e-4)
        assert point.settings["model.norm"] is (share_of_norm < 0.5)


@pytest.mark.parametrize(
    ("method", "first"),
    [
        ("sobol", ["lr=0.00403_norm=False_warmup=0.343", "lr=0.0144_norm=True_warmup=0.113"]),
        ("random", ["lr=0.00105_norm=True_warmup=0.189", "lr=0.00136_norm=False_warmup=0.102"]),
    ],
)
def test_draws_stay_what_they_were(method: str, first: list[str]) -> None:
    """Names of run folders follow from them, also with later versions of scipy and numpy."""
    points = draw(LINES, 2, method)

    assert attributes(points, "name") == first


def test_seeds_have_other_draws() -> None:
    draws = labels(draw(LINES, 8, seed=0))
    other_draws = labels(draw(LINES, 8, seed=1))

    assert set(draws).isdisjoint(other_draws)


def test_a_line_with_one_value_does_not_change_the_draws_of_others() -> None:
    with_depth = LINES | {"model.depth": [4]}

    assert values(with_depth, "depth", 8) == [4] * 8
    assert values(with_depth, "lr", 8) == values(LINES, "lr", 8)


def test_sobols_draws_are_even_in_every_line() -> None:
    rates = values(LINES, "lr", 8)
    norms = values(LINES, "norm", 8)

    logarithms = np.log(np.array(rates) / 1e-3)
    shares = logarithms / math.log(30)
    eighths = np.floor(8 * shares)
    assert sorted(eighths) == list(range(8))
    assert norms.count(True) == 4


@pytest.mark.filterwarnings("error")
def test_a_number_of_draws_between_powers_of_two_takes_the_first() -> None:
    """scipy warns of other numbers than powers of two."""
    draws = labels(draw(LINES, 12))

    assert draws == labels(draw(LINES, 16))[:12]
    assert "the first of 16; Sobol's points are even at 8 and 16" in Search("sobol", 12).label
    assert Search("sobol", 16).label == "16 draws by sobol, seed 0"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_whole_numbers_are_drawn_between_whole_numbers(scale: str) -> None:
    """Numbers from 0.5 to 4.5 are drawn and rounded."""
    depth_range = {"low": 1, "high": 4, "scale": scale}
    lines = {"model.depth": depth_range, "model.lr": LOG}

    depths = values(lines, "depth", 256)

    assert set(map(type, depths)) == {int}
    assert set(depths) == {1, 2, 3, 4}
    for depth, count in Counter(depths).items():
        share = 1 / 4
        if scale == "log":
            share = math.log((depth + 0.5) / (depth - 0.5), 4.5 / 0.5)
        assert count / 256 == pytest.approx(share, abs=0.01)


def test_a_draw_stays_in_its_range_and_its_name_is_short() -> None:
    beta_range = {"low": 0.98765, "high": 0.99999}
    eps_range = {"low": 1.234e-9, "high": 0.8, "scale": "log"}
    lines = {"model.beta": beta_range, "model.eps": eps_range}

    points = draw(lines, 200, "random")

    for point in points:
        assert 0.98765 <= point.shown["beta"] <= 0.99999
        assert 1.234e-9 <= point.shown["eps"] <= 0.8
        assert len(point.name) <= len("beta=0.98765_eps=1.234e-09")
    betas = {point.shown["beta"] for point in points}
    assert len(betas) > 50


def test_equal_draws_are_drawn_again() -> None:
    lines = {"model.depth": {"low": 1, "high": 5}}

    depths = values(lines, "depth", 5)

    assert sorted(depths) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"here has 5 different settings, and search\.draws is 6"):
        draw(lines, 6)


def test_arms_with_the_same_ranges_have_the_same_draws(folder: Path) -> None:
    study = searched(folder)

    gpt, angpt = study.arms
    assert labels(gpt.points) == labels(angpt.points)
    names = attributes(study.tuning_runs(), "name")
    assert len(names) == 2 * 8
    assert len(set(names)) == 2 * 8


def test_the_plan_counts_draws(folder: Path) -> None:
    pace = {"flops_per_second": 1e10}
    study = searched(folder, pace=pace)
    eight_rates = arms_with(tune={RATE: list(range(8))})
    grid = changed_study(folder, pace=pace, arms=eight_rates)

    text = describe_plan(study, 2, {}, {})
    grid_text = describe_plan(grid, 2, {}, {})

    assert "search: 8 draws by sobol, seed 0\n" in text
    assert "gpt: 8 draws of lr 0.05 … 0.8 (log) × 1 tuning seeds, the best on 3 seeds" in text
    *_, tuning, measuring, hours = text.splitlines()
    assert grid_text.splitlines()[-3:] == [tuning, measuring, hours]


def test_a_budget_changes_an_end_of_a_range_and_the_draws(folder: Path) -> None:
    small = {
        "search": {"draws": 2},
        "shared": {"tune": {RATE: {"low": 0.1}}},
    }
    changes = {
        "search": {"draws": 8},
        "budgets": {"small": small},
        "arms": {"gpt": GPT_ARM},
    }
    path = write_study(folder, **SEARCHED | changes)

    study = read_study(path, "small")

    (arm,) = study.arms
    assert len(arm.points) == 2
    assert arm.ranges[0].label == "lr 0.1 … 0.8 (log)"


def grid_arm(folder: Path, **changes: Any) -> Study:
    grid = {"title": "grid", "configs": ["gpt.yaml"], "tune": {RATE: [0.1, 0.2, 0.4]}}
    return searched(folder, arms={"gpt": GPT_ARM, "grid": grid}, **changes)


def test_arms_with_other_numbers_of_tries_are_refused_unless_the_file_allows_it(
    folder: Path,
) -> None:
    with pytest.raises(UserError, match=r"different numbers of settings \(gpt 8, grid 3\)"):
        grid_arm(folder)

    equal = grid_arm(folder, draws=3)
    unequal = grid_arm(folder, equal_tuning=False)
    assert len(equal.tuning_runs()) == 6
    assert len(unequal.tuning_runs()) == 11


def test_the_report_and_the_console_tell_of_unequal_tuning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An arm with one setting is not tuned, which is the least equal of all."""
    single = {"configs": ["gpt.yaml"], "tune": {RATE: [0.2]}}
    study = searched(folder, arms={"gpt": RATE_ARM, "single": single}, equal_tuning=False)

    text = reported(study, folder)
    print_summary(read_results(study, folder / "out"), Console(width=150))

    assert "UNEQUAL TUNING, settings tried: gpt 8, single 1." in text
    assert "Tuning budget: UNEQUAL, settings tried: gpt 8, single 1, each" in text
    assert "note: UNEQUAL TUNING, settings tried: gpt 8, single 1" in capsys.readouterr().out


def check_refusal(folder: Path, message: str, **changes: Any) -> None:
    """A study with an arm that draws the rate is refused in a single sentence."""
    study = {"search": {"draws": 4}, "arms": {"gpt": RATE_ARM}, "seeds": [1]} | changes

    with pytest.raises(UserError, match=message) as error:
        changed_study(folder, **study)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"low": 1.0, "high": 0.5}, "low 1.0 and high 0.5: give a higher high"),
        ({"low": 1.0, "high": 1.0}, "low 1.0 and high 1.0: give a higher high"),
        ({"low": 0, "high": 1, "scale": "log"}, "has scale log and low 0: give a low above 0"),
        ({"low": 0.1, "high": 1, "scale": "ln"}, "has scale ln: choose one of linear, log"),
        ({"low": 0.1}, "'model.init_args.lr' in tune of arm 'gpt' .* has no finite high"),
        ({"low": 0.1, "high": math.inf}, "has no finite high: give a number"),
        ({"low": "a", "high": 1}, "low is str in place of int or float"),
        (
            {"low": 0.1, "high": 1, "step": 1},
            "unknown key 'step': the known ones are high, low, scale",
        ),
    ],
)
def test_wrong_ranges_are_refused(folder: Path, bounds: dict[str, Any], message: str) -> None:
    arm = RATE_ARM | {"tune": {RATE: bounds}}

    check_refusal(folder, message, arms={"gpt": arm})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": {RATE: LOG, "model.x": []}}, "tune of arm 'gpt' .* has no values for 'model.x'"),
        (
            {"tune": [{RATE: LOG}]},
            "tune of arm 'gpt' .* is a list, and has a range: give the lines of one",
        ),
        ({"tune": {RATE: [0.1, 0.2]}}, "search of study.yaml has no range to draw from: give one"),
        ({"tune": None}, "search of study.yaml has no range to draw from: give one"),
        (
            {"vary": {"model.d": {"low": 1, "high": 2}}},
            "vary .* has a range for 'model.d', and only `tune`",
        ),
    ],
)
def test_arms_that_cannot_be_drawn_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    check_refusal(folder, message, arms={"gpt": RATE_ARM | changes})


def test_a_range_of_seeds_is_refused(folder: Path) -> None:
    seeds = {"seed_everything": {"low": 1, "high": 2}}

    check_refusal(folder, "seeds of study.yaml has a range for 'seed_", seeds=[seeds])


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (None, "has a range, and the study has no `search`: give `search: {method: sobol"),
        ({"method": "sobol"}, "search.draws of study.yaml is missing: give 1 or more"),
        ({"draws": 0}, "search.draws of study.yaml is 0: give 1 or more"),
        ({"draws": 2.5}, "search.draws is float in place of int"),
        ({"draws": 4, "seed": -1}, "search.seed of study.yaml is -1: give 0 or more"),
        (
            {"draws": 4, "method": "grid"},
            "search.method of study.yaml is grid: choose one of sobol, random",
        ),
        ({"draw": 4}, "unknown key 'draw'"),
    ],
)
def test_wrong_searches_are_refused(
    folder: Path, search: dict[str, Any] | None, message: str
) -> None:
    check_refusal(folder, message, search=search)


def bowl(centre: float) -> Any:
    """Losses with their minimum at a rate. anGPT is lower, and fails above 0.6."""

    def final(run, values, *_):
        rate = values["lr"]
        loss = 3.5 + math.log(rate / centre) ** 2 + 0.01 * values["seed"]
        if run.arm.base == "gpt":
            return loss
        return math.nan if rate > 0.6 else loss - 0.2

    return final


def reported(study: Study, folder: Path, centre: float = 0.2) -> str:
    """The report on a trained study, in Markdown."""
    train(study, folder / "out", bowl(centre))
    results = read_results(study, folder / "out")
    return write_report(results).with_suffix(".md").read_text()


def test_the_report_has_all_draws_and_a_picture(folder: Path) -> None:
    study = searched(folder, draws=16)

    text = reported(study, folder)

    gpt, _ = study.arms
    rates = [point.shown["lr"] for point in gpt.points]
    best_first = sorted(rates, key=lambda rate: abs(math.log(rate / 0.2)))
    rates_in_table = re.findall(r"^\| GPT\+ \| lr=(\S+)", text, re.MULTILINE)
    assert rates_in_table == list(map(str, best_first))
    assert "Tuning budget: 16 settings for each arm, each trained on 1 seed (seed=0)" in text
    assert "Search: 16 draws by sobol, seed 0." in text
    assert "Ranges of all arms: lr 0.05 … 0.8 (log)." in text
    assert "inside the ranges |" in text
    assert "![loss over each range](tuning.png)" in text
    assert (folder / "out" / "tuning.png").stat().st_size > 5000
    record = json.loads((folder / "out" / "report.json").read_text())
    assert record["search"] == {"method": "sobol", "draws": 16, "seed": 0}
    assert len(record["tuning"]["gpt"]) == 16
    n_failed = sum(rate > 0.6 for rate in rates)
    assert n_failed > 0
    assert f"| anGPT | 16 of 16 | {n_failed} | lr={best_first[0]} |" in text


@pytest.mark.usefixtures("unsaved")
def test_arms_with_other_ranges_are_named(folder: Path) -> None:
    text = reported(grid_arm(folder, draws=3), folder)

    assert "RANGES DIFFER between arms:" in text
    assert "- GPT+: lr 0.05 … 0.8 (log).\n- grid: a grid of 3 settings." in text


@pytest.mark.parametrize(
    ("centre", "edges"),
    [
        (0.01, ["lr 0.0511 is the smallest of 64"]),
        (0.8, ["lr 0.796 is the largest of 64"]),
        (0.055, ["lr 0.0548 is in the outermost 5 % of lr 0.05 … 0.8 (log)"]),
        (0.065, []),
    ],
)
def test_a_best_draw_at_the_edge_of_its_range_is_named(
    folder: Path, centre: float, edges: list[str]
) -> None:
    study = searched(folder, draws=64, arms={"gpt": GPT_ARM}, seeds=[1])

    train(study, folder / "out", bowl(centre))

    (tuning,) = read_results(study, folder / "out").tunings
    assert tuning.edges == edges


@pytest.mark.usefixtures("unsaved")
def test_report_and_console_name_the_edge(folder: Path) -> None:
    study = searched(folder)

    text = reported(study, folder, centre=0.01)

    console = Console(width=200, record=True)
    print_summary(read_results(study, folder / "out"), console)
    (edge,) = re.findall(r"lr \S+ is the smallest of 8", text)[:1]
    assert f"{edge}: a wider range might find a better one" in console.export_text()


def test_of_mixed_choices_the_largest_is_at_the_edge(folder: Path) -> None:
    """No two draws differ in the choice alone."""
    tune = {RATE: LOG, "data.init_args.batch_size": [2, 4, 16]}
    shared = {"configs": ["common.yaml"], "tune": tune}
    study = searched(folder, shared=shared, draws=16)

    def final(run, values, *_):
        distance = abs(math.log(values["lr"] / 0.2))
        return 4.0 - 0.1 * values["batch_size"] + 0.01 * distance

    train(study, folder / "out", final)

    tuning, _ = read_results(study, folder / "out").tunings

    assert tuning.arm.space == "lr 0.05 … 0.8 (log), batch_size 2 or 4 or 16"
    assert tuning.edges == ["batch_size 16 is the largest of 3"]


@pytest.mark.usefixtures("unsaved")
def test_more_draws_keep_the_earlier_runs(start: Launch, folder: Path) -> None:
    searched(folder, draws=4, seeds=[1])
    earlier_runs = started_runs(finish(start("--jobs", "2")))
    study = searched(folder, draws=8, seeds=[1])

    printed = finish(start("--jobs", "2"))

    later_runs = started_runs(printed)
    tuning_runs = set(attributes(study.tuning_runs(), "name"))
    assert later_runs >= tuning_runs - earlier_runs
    assert later_runs.isdisjoint(earlier_runs)
    assert "tuning: 8 runs" in printed

    (folder / "out").rename(folder / "first")
    printed_with_reuse = finish(start("--jobs", "2", "--reuse", "first"))
    assert "started" not in printed_with_reuse
    assert printed_with_reuse.count("taken from first") == 2 * 8 + 2
    assert "Report:" in finish(start("--report_only"))
