"""The report of synthetic run folders: its numbers are those computed here from the same losses."""

import contextlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from anlit.commands.study import main
from anlit.compare.statistics import Summary
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.text import minus
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from anlit.study.report import print_summary, write_report
from anlit.study.results import StudyResults, read_results
from anlit.study.sections import loss_gap, trend
from anlit.study.sections.registry import check_sections
from anlit.study.state import note_end, note_start
from tests.study.conftest import write_configs, write_study
from tests.study.synthetic import SHARE, Final, curve_to, train

TOKENS = 400 * 8 * 256
FINAL_LOSSES = {("gpt", 1): 3.50, ("gpt", 2): 3.53, ("gpt", 3): 3.49,
        ("angpt", 1): 3.30, ("angpt", 2): 3.36, ("angpt", 3): 3.31}  # fmt: skip
SEEDS = (1, 2, 3)
TWO = {
    name: {"title": title, "configs": [f"{name}.yaml"]}
    for name, title in (("gpt", "GPT+"), ("angpt", "anGPT"))
}
COMMAND = "anlit study --config study.yaml"


def final(run, values, parameters, tokens):
    """`FINAL_LOSSES` at a rate of 0.2, more at other rates.

    anGPT fails at 0.4, and GPT+ diverges late at 0.1.
    """
    rate = values.get("lr", 0.2)
    if (run.arm.base, rate) == ("angpt", 0.4):
        return math.nan
    if (run.arm.base, rate) == ("gpt", 0.1):
        return math.inf
    return FINAL_LOSSES.get((run.arm.base, values["seed"]), 3.4) + abs(rate - 0.2)


def trained(folder: Path, loss: Final = final, **changes: object) -> Study:
    """The study with changes, after its runs."""
    study = read_study(write_study(folder, **changes), None)
    train(study, folder / "out", loss)
    return study


def results(study: Study) -> StudyResults:
    return read_results(study, Path("out"), COMMAND)


class Page:
    """A report in Markdown: its text, the rows of its tables, and the names of its pictures."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text()
        lines = [
            line for line in self.text.splitlines() if line.startswith("|") and "---" not in line
        ]
        self.rows = [
            [re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|")]
            for line in lines
        ]
        self.pictures = re.findall(r"^!\[.*\]\((.*)\)$", self.text, re.MULTILINE)

    def row(self, first: str, columns: int) -> list[str]:
        return next(row for row in self.rows if row[0].startswith(first) and len(row) == columns)


def report(study: Study) -> Page:
    return Page(write_report(results(study)).with_suffix(".md"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of a study; tests only read it."""
    folder = tmp_path_factory.mktemp("study")
    write_configs(folder)
    with contextlib.chdir(folder):
        page = report(trained(folder))
    page.path = folder / "out" / "report.md"
    return page


def test_losses_speed_ups_and_tests_are_those_of_the_run_folders(page: Page) -> None:
    angpt_losses = [FINAL_LOSSES["angpt", seed] for seed in SEEDS]
    gpt_losses = [FINAL_LOSSES["gpt", seed] for seed in SEEDS]
    # The synthetic curves reach GPT+'s end between two of ten points.
    ratios = [
        1 / np.interp(-target, -curve_to(losses), SHARE)
        for losses, target in zip(angpt_losses, gpt_losses, strict=True)
    ]
    row = page.row("anGPT", 11)
    low, high = np.exp(stats.ttest_1samp(np.log(ratios), 0).confidence_interval())
    speed_up = f"{stats.gmean(ratios):.2f} ({low:.2f} … {high:.2f})"
    mean = fmean(angpt_losses)
    mean_and_sd = f"{mean:.4f} ± {stdev(angpt_losses):.4f}"
    assert (row[1], row[3], row[7]) == ("3", mean_and_sd, speed_up)
    test = stats.ttest_rel(angpt_losses, gpt_losses)
    low, high = test.confidence_interval()
    shown = minus(f"{mean - fmean(gpt_losses):+.4f} ({low:+.4f} … {high:+.4f})")
    p = f"p = {test.pvalue:.4f}"
    assert (
        f", {shown} from the baseline: significant by the paired t-test, n = 3, {p}, Holm {p}; speed-up"
        in page.text
    )


@pytest.mark.parametrize("ending", ["failed", "diverged", "killed"])
def test_a_seed_that_is_lost_counts_and_is_named(folder: Path, ending: str) -> None:
    """The recomputed comparison has it too.

    A killed run may have no config.yaml, and has not recorded that it failed.
    """

    def loss(run, *values):
        if (run.arm.base, run.seed.name) == ("angpt", "seed=2"):
            return {"failed": math.nan, "diverged": math.inf, "killed": 3.0}[ending]
        return final(run, *values)

    section = {"loss_gap": {"baseline": "gpt", "each": "d"}}
    vary = {"vary": {"d": {64: {"model.init_args.d_model": 64}}}, "configs": ["common.yaml"]}
    sections = ["convergence", {"trend": {"over": "d"}}, section]
    study = trained(folder, loss, arms=TWO, shared=vary, baseline="gpt_d=64", sections=sections)
    (lost_folder,) = folder.glob("out/angpt*seed=2*")
    if ending == "killed":
        (lost_folder / "config.yaml").unlink()
        (lost_folder / "run.json").write_text('{"status": "running"}')
        note_start(lost_folder, "local")
        note_end(lost_folder, -9)
    page = report(study)
    row = page.row("anGPT", 11)
    assert (row[1], row[3], row[7]) == ("2 of 3", "2 of 3 seeds", "2 of 3 seeds")
    assert f"LOST {lost_folder.name} (failed" in page.text.replace("\\", "")
    assert "has a loss on 2 of 3 seeds only; speed-up 2 of 3 seeds in tokens" in page.text
    assert ["anGPT", "64", "2 of 3 seeds"] in page.rows, "the trend"
    assert page.row("64", 7)[3:] == ["2 of 3", "3.5067 ± 0.0208", "2 of 3 seeds", "2 of 3 seeds"], (
        "the gap"
    )
    console = Console(width=80, record=True)
    print_summary(results(study), console)
    assert "2 of 3" in console.export_text()
    assert main(["--recompute", "out"]) == 0
    assert Page(page.path).row("anGPT", 11) == row


def test_a_report_of_half_a_study_shows_what_has_ended_and_names_what_has_not(folder: Path) -> None:
    """In the midst of tuning no point is the best yet."""
    study = trained(folder)
    shutil.rmtree(next(folder.glob("out/gpt*seed=3*")))
    text = report(study).text
    assert "NOT ENDED: GPT+ (seed=3)." in text
    assert "\n- GPT+: waits for seed=3." in text
    assert main(["--recompute", "out"]) == 0
    assert "\n- GPT+: waits for seed=3." in (folder / "out" / "report.md").read_text()
    for folder_of_run in folder.glob("out/gpt_lr=0.4*seed=0*"):
        shutil.rmtree(folder_of_run)
    page = report(study)
    assert page.row("GPT+", 7) == ["GPT+", "2 of 3", "1", "so far lr=0.2", "3.4000", "–", "–"]
    assert "NOT ENDED: GPT+ (its tuning)." in page.text
    assert (
        "The baseline, GPT+, has no finished run yet, so nothing is compared.\n\n- GPT+: waits for its"
        in page.text
    )


def test_tuning_names_the_best_the_failed_and_the_edges(page: Page) -> None:
    tuned = {row[0]: row for row in page.rows if row[1:2] == ["3 of 3"]}
    assert tuned["GPT+"][1:] == ["3 of 3", "1", "lr=0.2", "3.4000", "3.6000", "inside the grid"]
    assert tuned["anGPT"][1:5] == ["3 of 3", "1", "lr=0.2", "3.4000"]
    assert ["anGPT", "lr=0.4", "–", "failed UserError: the loss became NaN"] in page.rows
    assert [
        "GPT+",
        "lr=0.1",
        "–",
        "failed diverged: its last validation loss is not finite",
    ] in page.rows
    assert any(
        row[1] == "UserError: the loss became NaN" and row[0].startswith("angpt_lr=0.4")
        for row in page.rows
    )


def test_the_page_travels_alone_and_its_twins_say_the_same(page: Page) -> None:
    html = page.path.with_suffix(".html").read_text()
    assert html.count("<tr>") == len(page.rows)
    assert html.count('src="data:image/png;base64,') == len(page.pictures) == 1
    assert "://" not in re.sub(r"data:image[^\"]*", "", html)
    for text in (
        "0123456789",
        "test cpu, 2 cores",
        "content_sha256 c0",
        f"`{COMMAND}`",
        "seed=0",
    ):
        assert text in page.text.replace("\\", "")
    raw = json.loads(page.path.with_suffix(".json").read_text())
    assert raw["selected"] == {"gpt": {"lr": 0.2}, "angpt": {"lr": 0.2}}
    (compared,) = raw["comparisons"]
    assert len(raw["measured"]) == len(raw["runs"]) == 2 * 3 + len(compared["runs"])
    final_losses = sorted(
        (run["counted_in"], run["curve"]["loss"][-1])
        for run in map(raw["measured"].get, compared["runs"])
    )
    assert final_losses == [
        ("GPT+", 3.49),
        ("GPT+", 3.50),
        ("GPT+", 3.53),
        ("anGPT", 3.30),
        ("anGPT", 3.31),
        ("anGPT", 3.36),
    ]


def test_a_recorded_report_is_computed_again_from_its_curves(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    shutil.copytree(page.path.parent, folder, ignore=shutil.ignore_patterns("g*", "a*", "*.png"))
    record, text = (
        json.loads((folder / "report.json").read_text()),
        (folder / "report.md").read_text(),
    )
    (compared,) = record["comparisons"]
    expected = compared["groups"][1]["speedup_tokens"]["values"]
    compared["groups"][1]["speedup_tokens"]["values"] = [9.0]
    (folder / "report.json").write_text(json.dumps(record))
    (folder / "report.md").write_text(text.replace("speed-up", "velocity"))
    assert main(["--recompute", str(folder)]) == 0
    (recomputed,) = json.loads((folder / "report.json").read_text())["comparisons"]
    assert recomputed["groups"][1]["speedup_tokens"]["values"] == pytest.approx(expected, rel=1e-5)
    assert (folder / "report.md").read_text() == text
    assert (folder / "1-convergence.png").is_file()
    compared["groups"][1]["label"] = compared["groups"][0]["label"]
    write_json(folder / "report.json", record)
    with pytest.raises(UserError, match="two are the same"):
        main(["--recompute", str(folder)])
    with pytest.raises(UserError, match="the folder of a study"):
        main(["--recompute", str(tmp_path)])


def test_a_report_of_nothing_obeys_no_markup_in_its_title_and_is_not_written_over(
    folder: Path,
) -> None:
    page = write_report(
        results(read_study(write_study(folder, title="<script>alert(1)</script>"), None))
    )
    assert re.search(
        "6 runs: 6 pending.*GPT.+has no finished run yet",
        page.with_suffix(".md").read_text(),
        re.DOTALL,
    )
    assert "<script>" not in page.read_text()
    shutil.copy(folder / "study.yaml", folder / "other.yaml")
    with pytest.raises(
        UserError, match=r"--output out has another report .* give another folder, or remove that"
    ):
        main(["--config", "other.yaml", "--output", "out", "--report_only"])
    with pytest.raises(
        UserError,
        match=r"finds no run of study.yaml in out: give the --output of its runs, or the fi",
    ):
        main(["--config", "study.yaml", "--output", "out", "--report_only"])


def test_the_printed_table_and_every_report_name_the_winning_settings(folder: Path) -> None:
    study = trained(folder, lambda run, values, *_: 3.0 + values["lr"], sections=["convergence"])
    console = Console(width=80, record=True)
    print_summary(results(study), console)
    printed = console.export_text()
    gpt, angpt = (
        line.split() for line in printed.splitlines() if line.startswith(("GPT+ ", "anGPT "))
    )
    assert (gpt[1:], angpt[1:3]) == (
        ["lr=0.1", "3", "3.1000", "±", "0.0000", "1.00"],
        ["lr=0.1", "3"],
    )
    assert max(map(len, printed.splitlines())) <= 80
    edge = "lr 0.1 is the smallest of 3"
    assert f"note: gpt: {edge}" in printed
    assert edge in write_report(results(study)).with_suffix(".md").read_text(), (
        "a report without the section tuning"
    )


def test_the_printed_table_has_no_speed_up_of_an_arm_that_has_not_ended(folder: Path) -> None:
    study = trained(folder, lambda *_: 3.0, arms=TWO, sections=["convergence"])
    for file in folder.glob("out/angpt*/run.json"):
        write_json(file, json.loads(file.read_text()) | {"status": "interrupted"})
    console = Console(width=80, record=True)
    print_summary(results(study), console)
    (angpt,) = (
        line.split() for line in console.export_text().splitlines() if line.startswith("anGPT ")
    )
    assert angpt == ["anGPT", "as", "configured", "0", "–", "–"]


SIZES = {"d": {d: {"model.init_args.d_model": d} for d in (64, 128, 256)}}


def steps(*numbers: int) -> dict:
    return {"steps": {n: {"trainer.max_steps": n} for n in numbers}}


def test_trends(folder: Path) -> None:
    def loss(run, values, parameters, tokens):
        best = {64: 0.4, 128: 0.2, 256: 0.1}[values["d"]]
        return 3 + 0.1 * abs(math.log2(values["lr"] / best)) + 0.01 * values["seed"]

    arms = {"gpt": TWO["gpt"] | {"tune": {"model.init_args.lr": [0.1, 0.2, 0.4]}, "vary": SIZES}}
    two_arms = {"trend": {"over": "d", "arms": ["gpt_d=64", "gpt_d=128"]}}
    sections = [
        {"trend": {"value": "lr", "over": "parameters"}},
        {"trend": {"over": "parameters"}},
        two_arms,
    ]
    page = report(trained(folder, loss, arms=arms, baseline=None, sections=sections))
    assert len(page.pictures) == 3
    assert [row[1] for row in page.rows if len(row) == 3 and row[0] == "GPT+"][3:] == ["64", "128"]
    sizes = [2 * 1024 * d + 4 * 16 * d * d for d in (64, 128, 256)]
    line = stats.linregress(np.log(sizes), np.log([0.4, 0.2, 0.1]))
    half = line.stderr * stats.t.ppf(0.975, 1)
    slope, low, high = (f"{x:.2f}" for x in (line.slope, line.slope - half, line.slope + half))
    assert page.row("GPT+", 4) == ["GPT+", "3", slope, f"{low} … {high}"]
    assert page.row("GPT+", 3)[2] == "3.0200 ± 0.0100"


RATES = {
    "GPT+": [(130e3, [0.016]), (1.31e6, [0.004])],
    "nGPT": [(132e3, [0.016]), (1.32e6, [0.008])],
}
LOSSES = {
    "GPT+": [
        (x * 1e11, [5 - x / 100, 5.1])
        for x in (1.5, 3.1, 4.8, 5.8, 10, 14, 19, 30, 48, 57, 101, 189)
    ]
}


@pytest.mark.parametrize(("series", "ticks"), [(RATES, ["130k", "1.31M"]), (LOSSES, None)])
def test_a_trend_fits_a_column_and_its_ticks_do_not_overlap(
    tmp_path, monkeypatch, drawn, series, ticks
) -> None:
    monkeypatch.setattr(trend, "save", lambda figure, path: drawn.append(figure))
    points = {label: [(x, Summary(y)) for x, y in line] for label, line in series.items()}
    trend.draw_trend(points, "parameters", "lr" if ticks else "loss", tmp_path / "a.png", {})
    (figure,) = drawn
    figure.draw_without_rendering()
    labels = [
        label
        for label in figure.axes[0].get_xticklabels()
        if label.get_text() and label.get_visible()
    ]
    assert ticks in (None, [label.get_text() for label in labels])
    boxes = [label.get_window_extent() for label in labels]
    assert not any(left.overlaps(right) for left, right in itertools.pairwise(boxes))
    assert figure.get_figwidth() * 25.4 == pytest.approx(85, abs=0.2)
    assert not figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_window_extent())


def test_the_scaling_section_recovers_the_law(folder: Path) -> None:
    arms = {"gpt": TWO["gpt"] | {"vary": SIZES | steps(100, 400, 1600)}}
    study = trained(folder, lambda run, values, n, d: 1.5 + 40 * n**-0.3 + 60 * d**-0.25,
                    arms=arms, baseline=None, sections=[{"scaling": {"resamples": 20}}], seeds=[1])  # fmt: skip
    exponents = ["0.300", "0.250", f"{0.25 / 0.55:.3f}", f"{0.075 / 0.55:.3f}", "1.500", "9"]
    assert [cell.split(" ")[0] for cell in report(study).row("GPT+", 7)[1:]] == exponents


def test_the_lead_of_an_arm_at_each_size_and_length(folder: Path, monkeypatch, drawn) -> None:
    monkeypatch.setattr(loss_gap, "save", lambda figure, path: drawn.append(figure))
    ahead = {(64, 100): (0.5, 0.3), (64, 400): (-0.1, -0.2)}

    def loss(run, values, parameters, tokens):
        if (run.arm.base, values["d"], values["steps"], values["seed"]) == ("angpt", 128, 100, 2):
            return math.nan
        won = ahead.get((values["d"], values["steps"]), (0.1, 0.1))[values["seed"] - 1]
        return 4.0 + 0.01 * values["seed"] - (run.arm.base == "angpt") * won

    shared = {"configs": ["common.yaml"], "vary": SIZES | steps(100, 400)}
    section = {"loss_gap": {"baseline": "gpt", "each": "d"}}
    page = report(
        trained(
            folder, loss, arms=TWO, shared=shared, sections=[section], seeds=[1, 2], baseline=None
        )
    )
    assert [ax.get_title(loc="left") for ax in drawn[0].axes] == ["d 64", "d 128", "d 256"]
    rows = [row for row in page.rows if len(row) == 7 and row[2] == "anGPT"]
    assert [row[0] for row in rows] == ["64", "64", "128", "128", "256", "256"]
    (early, late, unpaired, *_), parameters = rows, 2 * 1024 * 64 + 4 * 16 * 64 * 64
    assert [early[1], late[1]] == [f"{n * 8 * 256 / parameters:.3g}" for n in (100, 400)]
    low, high = stats.ttest_1samp([-0.5, -0.3], 0).confidence_interval()
    assert early[3:6] == ["2", "4.0150 ± 0.0071", minus(f"-0.4000 ({low:+.4f} … {high:+.4f})")]
    assert float(early[6].split()[0]) > 1
    assert (late[5][:7], late[6]) == ("+0.1500", "not reached")
    assert unpaired[3:] == ["1 of 2", "4.0150 ± 0.0071", "1 of 2 seeds", "1 of 2 seeds"], (
        "a failed run counts"
    )


def test_the_onset_and_the_loss_after_it(folder: Path) -> None:
    section = {"onset": {"loss": 4.3, "after": 200_000, "baseline": "gpt"}}
    page = report(trained(folder, arms=TWO, sections=[section], seeds=[*SEEDS]))
    onsets = {}
    later = {}
    for key, loss in FINAL_LOSSES.items():
        tokens = SHARE * TOKENS
        losses = curve_to(loss)
        onsets[key] = np.interp(-4.3, -losses, tokens)
        later[key] = np.interp(onsets[key] + 200_000, tokens, losses)
    rows = [row for row in page.rows if len(row) == 5][-2:]
    for row, name in zip(rows, ("gpt", "angpt"), strict=True):
        thousands = [float(cell.removesuffix("k")) for cell in row[1].split(", ")]
        assert thousands == pytest.approx([onsets[name, seed] / 1e3 for seed in SEEDS], rel=5e-3)
        later_losses = [later[name, seed] for seed in SEEDS]
        assert row[3] == f"{fmean(later_losses):.3f} ± {stdev(later_losses):.3f}"
    assert rows[0][2] == rows[0][4] == "–"
    for column, numbers, scale in ((2, onsets, 1e-6), (4, later, 1.0)):
        pairs = [scale * (numbers["angpt", seed] - numbers["gpt", seed]) for seed in SEEDS]
        low, high = stats.ttest_1samp(pairs, 0).confidence_interval()
        assert rows[1][column] == minus(f"{fmean(pairs):.3f} ({low:.3f} … {high:.3f})")
    (folder / "study.yaml").unlink()
    section = {
        "onset": {"loss": 3.495, "after": 1, "baseline": "angpt"}
    }  # which one seed of GPT+ reaches
    page = report(
        read_study(write_study(folder, arms=TWO, sections=[section], seeds=[*SEEDS]), None)
    )
    (gpt, _) = [row for row in page.rows if len(row) == 5][-2:]
    assert (gpt[1].count("–"), gpt[2]) == (2, "1 of 3 seeds")


def test_a_trend_over_what_no_arm_varies_is_refused_before_a_run(folder: Path) -> None:
    arms = {
        "gpt": TWO["gpt"] | {"vary": SIZES},
        "angpt": TWO["angpt"] | {"vary": {"tau": [1]}},
    }

    def study_with(**options: object) -> Study:
        sections = [{"trend": {"over": "d", **options}}]
        path = write_study(folder, arms=arms, baseline=None, sections=sections)
        return read_study(path, None)

    check_sections(study_with(arms=["gpt"]))

    message = r"over 'd', which is no number of arm 'angpt_tau=1': .* parameters, .*, tau"
    with pytest.raises(UserError, match=message):
        check_sections(study_with())


@pytest.mark.parametrize(("section", "message"), [
    ({"loss_gap": {"baseline": "gpt"}}, "the section 'loss_gap' of study.yaml is not .*: each is missing"),
    ({"loss_gap": {"baseline": "gpt", "each": "lr", "arms": []}}, "has the unknown key 'arms': the known ones are"),
    ({"onset": {"loss": "4.3", "after": 1, "baseline": "gpt"}}, "loss is str in place of int or float"),
    ({"tuning": 3}, "the section 'tuning' of study.yaml is not .* is int in place of dict"),
    ({"loss_gap": {"baseline": "other", "each": "lr"}}, "names the arm 'other', which is none of gpt, angpt"),
    ({"loss_gap": {"baseline": "gpt", "each": "size"}}, "each 'size': choose one of none"),
    ({"dynamics": {"arms": ["gpt", "bert"]}}, "names the arm 'bert', which is none of gpt, angpt"),
    ({"trend": {"over": "depth"}}, "over 'depth', which is no number of arm 'gpt': vary or tune it, or choose one of"),
    ({"trend": {"over": "tokens", "value": "lr"}}, "has value 'lr', which is no number of arm 'gpt': vary or tune it"),
    ({"embed": {"name": "lenghts"}}, "has the name 'lenghts', which is no command of `after`: choose one of lengths"),
])  # fmt: skip
def test_mistakes_in_sections_are_told(folder: Path, section: Any, message: str) -> None:
    commands = {"lengths": "anlit lengths {runs} --output {output}"}
    study = trained(folder, arms=TWO, sections=[section], seeds=[1], after=commands)
    with pytest.raises(UserError, match=message):
        write_report(results(study))
