"""A recorded study's page prints the numbers of its record, and the record has those of its runs.

The pages of three studies without curves, scaling-cpu, hyperparameters-cpu and bfloat16_h, are the
only record of each run's loss.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.compare.statistics import Summary, mean_difference, mean_sd, power_law
from anlit.reporting.text import minus
from anlit.study.sections.scaling import Array, best_split, fit_law, loss_of_compute
from tests.docs.printed_figures import is_printed, sections, tables
from tests.golden.test_recorded_studies import RESULTS, recorded_studies

TUNING_SEED = "seed=0"
RUN_NAME = re.compile(
    r"(?P<point>.*?)_(?P<seed>(?:data_seed|initial_weights|seed|seed_everything)=.*)-[0-9a-f]{6}"
)
ARMS = {"GPT+": "gpt", "nGPT": "ngpt", "anGPT": "angpt"}
"""Title → key in the studies."""


def tables_of(folder: Path, heading: str) -> list[list[list[str]]]:
    return tables(sections(folder / "report.md")[heading])


def read(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def printed_losses(folder: Path) -> dict[str, str]:
    """The loss of each run in the page's list of runs, by the name of the run's folder."""
    (rows,) = tables_of(folder, "Runs")
    losses = {}
    for _, _, loss, status, _, run in rows:
        if status == "finished":
            losses[Path(run.strip("`")).name] = loss
    return losses


def losses_by_point(folder: Path) -> dict[str, dict[str, str]]:
    """The printed losses by arm with setting, as runs are named, and by seed."""
    losses: dict[str, dict[str, str]] = {}
    for name, loss in printed_losses(folder).items():
        match = RUN_NAME.fullmatch(name)
        assert match is not None, name
        if "_annealed=" not in match["seed"]:
            losses.setdefault(match["point"], {})[match["seed"]] = loss
    return losses


def point_name(arm: str, setting: dict[str, Any]) -> str:
    """`gpt_lr=0.016`, how the names of the point's runs begin."""
    return "_".join([arm, *(f"{key}={value}" for key, value in setting.items())])


def assert_printed(printed: list[str], values: list[float], label: str) -> None:
    assert len(printed) == len(values), label
    for cell, value in zip(printed, values, strict=True):
        assert is_printed(minus(cell), minus(f"{value:.6f}")), label


STUDIES = [path.parent for path in recorded_studies()]
TUNED_STUDIES = [folder for folder in STUDIES if read(folder)["tuning"]]


def each(folders: list[Path]) -> pytest.MarkDecorator:
    names = [str(folder.relative_to(RESULTS)) for folder in folders]
    return pytest.mark.parametrize("folder", folders, ids=names)


@each(STUDIES)
def test_a_page_has_the_final_loss_of_each_curve(folder: Path) -> None:
    losses = printed_losses(folder)

    for name, run in read(folder)["measured"].items():
        if run["state"] == "finished":
            assert_printed([losses[Path(name).name]], run["curve"]["loss"][-1:], name)


@each(STUDIES)
def test_a_point_has_the_losses_of_its_runs(folder: Path) -> None:
    record = read(folder)
    losses = losses_by_point(folder)

    assert record["points"]
    for point in record["points"]:
        name = point_name(point["arm"], record["selected"][point["arm"]])
        by_seed = losses.get(name, {})
        measured = [loss for seed, loss in by_seed.items() if seed != TUNING_SEED]
        assert_printed(measured, point["losses"], name)


@each(TUNED_STUDIES)
def test_a_tried_setting_has_the_loss_of_its_run(folder: Path) -> None:
    losses = losses_by_point(folder)

    for arm, tried in read(folder)["tuning"].items():
        for entry in tried:
            name = point_name(arm, entry["setting"])
            printed = [losses[name][TUNING_SEED]] if name in losses else []
            values = [] if entry["loss"] is None else [entry["loss"]]
            assert_printed(printed, values, name)


@each(TUNED_STUDIES)
def test_the_tables_of_tuning_have_the_tried_losses(folder: Path) -> None:
    (best_rows,) = tables_of(folder, "Tuning")
    (rows,) = tables_of(folder, "Tuning, all settings")
    tried_by_arm = list(read(folder)["tuning"].values())
    tried = list(itertools.chain.from_iterable(tried_by_arm))

    assert len(rows) == len(tried)
    for (_, setting, loss, _), entry in zip(rows, tried, strict=True):
        if entry["loss"] is not None:
            assert_printed([loss], [entry["loss"]], setting)
    for row, (best, second, *_) in zip(best_rows, tried_by_arm, strict=True):
        if second["loss"] is not None:
            assert_printed(row[4:6], [best["loss"], second["loss"]], row[0])


@pytest.mark.parametrize(
    ("heading", "setting"),
    [
        ("Best learning rate over parameters", "lr"),
        ("Best batch size over parameters", "batch_size"),
    ],
)
def test_exponents_of_the_best_settings_follow_from_the_points(heading: str, setting: str) -> None:
    folder = RESULTS / "hyperparameters-cpu"
    (rows,) = tables_of(folder, heading)
    points = read(folder)["points"]

    assert [row[0] for row in rows] == list(ARMS)
    for title, n_points, exponent, interval in rows:
        values = [point["values"] for point in points if is_of(point, title)]
        law = power_law(column(values, "parameters"), column(values, setting))
        assert law is not None
        _, (median, low, high) = law
        assert n_points == str(len(values))
        assert_printed([exponent, *interval.split(" … ")], [median, low, high], title)


def is_of(point: dict[str, Any], title: str) -> bool:
    return point["arm"].partition("_")[0] == ARMS[title]


def column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


SCALING = RESULTS / "scaling-cpu"


def gaps() -> Iterator[list[str]]:
    """The rows of the table of losses minus GPT+'s, from the points."""
    points = {point["arm"]: point for point in read(SCALING)["points"]}
    shapes = [arm.partition("_")[2] for arm in points if arm.startswith("gpt_")]
    for shape in shapes:
        baseline = points[f"gpt_{shape}"]
        tokens_per_parameter = baseline["values"]["tokens_per_parameter"]
        for title in ("nGPT", "anGPT"):
            # The runs of the first seeds were finished first.
            losses = dict(enumerate(points[f"{ARMS[title]}_{shape}"]["losses"]))
            baseline_losses = {seed: baseline["losses"][seed] for seed in losses}
            yield [
                baseline["values"]["size"],
                f"{tokens_per_parameter:.6f}",
                title,
                str(len(losses)),
                mean_sd(Summary([*baseline_losses.values()]), 6),
                mean_difference(losses, baseline_losses, ".6f"),
            ]


def test_gaps_to_gpt_follow_from_the_points() -> None:
    (rows,) = tables_of(SCALING, "Loss minus GPT+'s")
    computed_rows = list(gaps())

    assert len(rows) == len(computed_rows)
    for row, computed in zip(rows, computed_rows, strict=True):
        for printed, cell in zip(row, computed, strict=True):
            assert is_printed(printed, cell), row


def finished_runs(title: str) -> Array:
    """Parameters, tokens and losses of an arm's runs, (3, runs)."""
    runs = []
    for point in read(SCALING)["points"]:
        if is_of(point, title):
            values = point["values"]
            for loss in point["losses"]:
                runs.append((values["parameters"], values["tokens"], loss))
    return np.array(runs).T


@pytest.mark.slow
def test_laws_of_scaling_follow_from_the_points() -> None:
    """The bootstrap's intervals, which take a minute, are left out."""
    laws, predictions = tables_of(SCALING, "Scaling")
    runs = {title: finished_runs(title) for title in ARMS}
    largest = max(6 * (parameters * tokens).max() for parameters, tokens, _ in runs.values())

    assert [row[0] for row in laws] == list(ARMS)
    for title, a, b, _, _, lowest, n_runs in laws:
        law = fit_law(runs[title])
        e, _, _, exponent_n, exponent_d = law
        assert n_runs == str(runs[title].shape[1])
        if a != "not determined":
            assert first_number(a) == pytest.approx(exponent_n, rel=0.01)
        assert first_number(b) == pytest.approx(exponent_d, rel=0.01)
        assert first_number(lowest) == pytest.approx(e, abs=0.002)
        for row, share in zip(rows_of(predictions, title), (0.1, 1, 10), strict=True):
            flops = share * largest
            split = [flops, *map(float, best_split(law, flops))]
            assert list(map(float, row[1:4])) == pytest.approx(split, rel=0.05)
            loss = float(loss_of_compute(law, flops))
            assert float(row[4]) == pytest.approx(loss, abs=0.002)


def first_number(cell: str) -> float:
    return float(cell.partition(" ")[0])


def rows_of(rows: list[list[str]], title: str) -> list[list[str]]:
    return [row for row in rows if row[0] == title]
