"""The report of synthetic run folders: its numbers are those computed here from the same losses."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from scipy import stats

from anlit.commands.study import main
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.study.plan import Study
from anlit.study.report import write_report
from anlit.study.state import note_end, note_start
from tests.compare.reports import geometric_t_interval
from tests.study.conftest import GPT_ARM, UNTUNED_ARMS, changed_study, write_configs
from tests.study.reports import (
    ANGPT_LOSSES,
    COMMAND,
    GPT_LOSSES,
    Page,
    final,
    printed_summary,
    report,
    results,
    trained,
    with_interval,
    words_of_line,
)
from tests.study.synthetic import SHARE, curve_to


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of a study; tests only read it."""
    folder = tmp_path_factory.mktemp("study")
    write_configs(folder)
    with contextlib.chdir(folder):
        page = report(trained(folder))
    page.path = folder / "out" / "report.md"
    return page


def test_losses_and_speed_ups_are_those_of_the_run_folders(page: Page) -> None:
    # The synthetic curves reach GPT+'s end between two of ten points.
    ratios = []
    for loss, target in zip(ANGPT_LOSSES, GPT_LOSSES, strict=True):
        share = np.interp(-target, -curve_to(loss), SHARE)
        ratios.append(1 / share)
    low, high = geometric_t_interval(ratios)

    row = page.row("anGPT", "speed-up, tokens")

    assert row["seeds"] == "3"
    assert row["validation loss"] == f"{fmean(ANGPT_LOSSES):.4f} ± {stdev(ANGPT_LOSSES):.4f}"
    assert row["speed-up, tokens"] == with_interval(".2f", stats.gmean(ratios), low, high)


def test_the_test_of_losses_is_a_paired_t_test(page: Page) -> None:
    test = stats.ttest_rel(ANGPT_LOSSES, GPT_LOSSES)
    low, high = test.confidence_interval()

    difference = fmean(ANGPT_LOSSES) - fmean(GPT_LOSSES)
    shown = with_interval("+.4f", difference, low, high)
    p = f"p = {test.pvalue:.4f}"
    verdict = f"significant by the paired t-test, n = 3, {p}, Holm {p}; speed-up"
    assert f", {shown} from the baseline: {verdict}" in page.text


LOST = {"failed": math.nan, "diverged": math.inf, "killed": 3.0}


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("ending", list(LOST))
def test_a_seed_that_is_lost_counts_and_is_named(folder: Path, ending: str) -> None:
    """The recomputed comparison has it too.

    A killed run may have no config.yaml, and has not recorded that it failed.
    """

    def loss(run, *values):
        if run.arm.base == "angpt" and run.seed.name == "seed=2":
            return LOST[ending]
        return final(run, *values)

    width = {"d": {64: {"model.init_args.d_model": 64}}}
    trend = {"trend": {"over": "d"}}
    gap = {"loss_gap": {"baseline": "gpt", "each": "d"}}
    options = {
        "arms": UNTUNED_ARMS,
        "shared": {"vary": width, "configs": ["common.yaml"]},
        "baseline": "gpt_d=64",
        "sections": ["convergence", trend, gap],
    }
    study = trained(folder, loss, **options)
    (lost_folder,) = folder.glob("out/angpt*seed=2*")
    if ending == "killed":
        (lost_folder / "config.yaml").unlink()
        (lost_folder / "run.json").write_text('{"status": "running"}')
        note_start(lost_folder, "local")
        note_end(lost_folder, -9)

    page = report(study)

    convergence_row = page.row("anGPT", "bits per byte")
    assert convergence_row["seeds"] == "2 of 3"
    assert convergence_row["validation loss"] == "2 of 3 seeds"
    assert convergence_row["speed-up, tokens"] == "2 of 3 seeds"
    assert f"LOST {lost_folder.name} (failed" in page.text.replace("\\", "")
    assert "has a loss on 2 of 3 seeds only; 2 of 3 seeds reach the baseline's loss" in page.text
    assert ["anGPT", "64", "2 of 3 seeds"] in page.rows, "the trend"
    (gap_row,) = page.table("baseline's loss")
    assert gap_row["seeds"] == "2 of 3"
    assert gap_row["baseline's loss"] == "3.5067 ± 0.0208"
    assert gap_row["minus the baseline's (95 %)"] == "2 of 3 seeds"
    assert gap_row["speed-up, tokens"] == "2 of 3 seeds"
    assert "2 of 3" in printed_summary(study)
    assert main(["--recompute", "out"]) == 0
    assert Page(page.path).row("anGPT", "bits per byte") == convergence_row


@pytest.mark.usefixtures("unsaved")
def test_a_report_of_half_a_study_shows_what_has_ended_and_names_what_has_not(
    folder: Path,
) -> None:
    study = trained(folder)
    shutil.rmtree(next(folder.glob("out/gpt*seed=3*")))

    report(study)
    assert main(["--recompute", "out"]) == 0

    assert "NOT ENDED: GPT+ (seed=3)." in (folder / "out" / "report.md").read_text()


@pytest.mark.usefixtures("unsaved")
def test_in_the_midst_of_tuning_no_point_is_the_best_yet(folder: Path) -> None:
    study = trained(folder)
    shutil.rmtree(next(folder.glob("out/gpt_lr=0.4*seed=0*")))

    page = report(study)

    assert page.row("GPT+", "best setting") == {
        "arm": "GPT+",
        "runs done": "2 of 3",
        "failed": "1",
        "best setting": "so far lr=0.2",
        "its loss": "3.4000",
        "second best": "–",
        "edge of the grid": "–",
    }
    assert "NOT ENDED: GPT+ (its tuning)." in page.text
    assert "The baseline, GPT+, has no finished run yet, so nothing is compared." in page.text


@pytest.mark.usefixtures("unsaved")
def test_an_arm_without_a_comparable_run_is_named(folder: Path) -> None:
    def loss(run, *values):
        if run.arm.base == "angpt":
            return math.nan
        return final(run, *values)

    page = report(trained(folder, loss))

    assert "NO RUN CAN BE COMPARED: anGPT; see Failures." in page.text


def test_tuning_names_the_best_the_failed_and_the_edges(page: Page) -> None:
    gpt = ["GPT+", "3 of 3", "1", "lr=0.2", "3.4000", "3.6000", "inside the grid"]
    angpt = page.row("anGPT", "best setting")
    failed = ["anGPT", "lr=0.4", "–", "failed UserError: the loss became NaN"]
    reason = "diverged: its last validation loss is not finite"
    diverged = ["GPT+", "lr=0.1", "–", f"failed {reason}"]

    assert gpt in page.rows
    assert angpt["runs done"] == "3 of 3"
    assert angpt["failed"] == "1"
    assert angpt["best setting"] == "lr=0.2"
    assert angpt["its loss"] == "3.4000"
    assert failed in page.rows
    assert diverged in page.rows
    assert page.row("angpt_lr=0.4", "why")["why"] == "UserError: the loss became NaN"


def test_the_page_travels_alone(page: Page) -> None:
    html = page.path.with_suffix(".html").read_text()

    assert html.count("<tr>") == len(page.rows)
    assert len(page.pictures) == 1
    assert html.count('src="data:image/png;base64,') == 1
    assert "://" not in re.sub(r"data:image[^\"]*", "", html)


@pytest.mark.parametrize(
    "text", ["0123456789", "test cpu, 2 cores", "content_sha256 c0", f"`{COMMAND}`", "seed=0"]
)
def test_the_page_names_the_origin_of_its_numbers(page: Page, text: str) -> None:
    assert text in page.text.replace("\\", "")


def test_the_record_has_all_runs_and_their_curves(page: Page) -> None:
    raw = json.loads(page.path.with_suffix(".json").read_text())

    assert raw["selected"]["gpt"] == {"lr": 0.2}
    assert raw["selected"]["angpt"] == {"lr": 0.2}
    (comparison,) = raw["comparisons"]
    n_runs = 2 * 3 + len(comparison["runs"])
    assert len(raw["measured"]) == n_runs
    assert len(raw["runs"]) == n_runs
    losses: dict[str, list[float]] = {"GPT+": [], "anGPT": []}
    for name in comparison["runs"]:
        run = raw["measured"][name]
        *_, final_loss = run["curve"]["loss"]
        losses[run["counted_in"]].append(final_loss)
    assert losses["GPT+"] == GPT_LOSSES
    assert losses["anGPT"] == ANGPT_LOSSES


@pytest.fixture
def recorded(page: Page, tmp_path: Path) -> Path:
    """A copy of the report without runs and pictures."""
    folder = tmp_path / "recorded"
    left_out = shutil.ignore_patterns("g*", "a*", "*.png")
    shutil.copytree(page.path.parent, folder, ignore=left_out)
    return folder


def groups_of(record: Any) -> list[dict[str, Any]]:
    """The configurations of the only comparison."""
    (comparison,) = record["comparisons"]
    return comparison["groups"]


def test_a_recorded_report_is_computed_again_from_its_curves(recorded: Path) -> None:
    file = recorded / "report.json"
    page = recorded / "report.md"
    record = json.loads(file.read_text())
    text = page.read_text()
    speedup = groups_of(record)[1]["speedup_tokens"]
    expected = speedup["values"]
    speedup["values"] = [9.0]
    write_json(file, record)
    page.write_text(text.replace("speed-up", "velocity"))

    assert main(["--recompute", str(recorded)]) == 0

    recomputed = json.loads(file.read_text())
    values = groups_of(recomputed)[1]["speedup_tokens"]["values"]
    assert values == pytest.approx(expected, rel=1e-5)
    assert page.read_text() == text
    assert (recorded / "1-convergence.png").is_file()


def test_a_record_with_two_groups_of_a_label_is_refused(recorded: Path) -> None:
    record = json.loads((recorded / "report.json").read_text())
    first, second = groups_of(record)
    second["label"] = first["label"]
    write_json(recorded / "report.json", record)

    with pytest.raises(UserError, match="two are the same"):
        main(["--recompute", str(recorded)])


def test_only_a_folder_with_a_report_is_computed_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder of a study"):
        main(["--recompute", str(tmp_path)])


def test_a_report_of_nothing_obeys_no_markup_in_its_title(folder: Path) -> None:
    study = changed_study(folder, title="<script>alert(1)</script>")

    page = write_report(results(study))

    text = page.with_suffix(".md").read_text()
    assert "6 runs: 6 pending." in text
    assert "has no finished run yet" in text
    assert "<script>" not in page.read_text()


def test_a_report_of_another_study_is_not_written_over(folder: Path, study: Study) -> None:
    write_report(results(study))
    shutil.copy(folder / "study.yaml", folder / "other.yaml")

    message = r"--output out has another report .* give another folder, or remove that"
    with pytest.raises(UserError, match=message):
        main(["--config", "other.yaml", "--output", "out", "--report_only"])


def test_a_report_without_a_run_is_refused(folder: Path, study: Study) -> None:
    write_report(results(study))

    message = "finds no run of study.yaml in out: give the --output of its runs, or the fi"
    with pytest.raises(UserError, match=message):
        main(["--config", "study.yaml", "--output", "out", "--report_only"])


@pytest.mark.usefixtures("unsaved")
def test_the_printed_table_and_every_report_name_the_winning_settings(folder: Path) -> None:
    """Also a report without the section tuning."""

    def loss(run, values, *_):
        return 3.0 + values["lr"]

    study = trained(folder, loss, sections=["convergence"])

    printed = printed_summary(study)

    gpt = ["GPT+", "lr=0.1", "3", "3.1000", "±", "0.0000", "1.00"]
    assert words_of_line(printed, "GPT+ ") == gpt
    _, setting, seeds, *_ = words_of_line(printed, "anGPT ")
    assert setting == "lr=0.1"
    assert seeds == "3"
    edge = "lr 0.1 is the smallest of 3"
    assert f"note: gpt: {edge}" in printed
    assert edge in report(study).text


def test_the_printed_table_names_the_baseline_of_each_speed_up(folder: Path) -> None:
    arms = UNTUNED_ARMS | {
        "slow": GPT_ARM | {"title": "slow"},
        "quick": GPT_ARM | {"title": "quick"},
    }
    comparisons = [
        {"title": "first", "baseline": "gpt", "arms": ["gpt", "angpt"]},
        {"title": "second", "baseline": "slow", "arms": ["slow", "quick"]},
    ]
    losses = {"gpt": 3.5, "angpt": 3.3, "slow": 4.0, "quick": 3.0}
    options = {"comparisons": comparisons, "sections": ["convergence"], "baseline": None}
    study = trained(folder, lambda run, *_: losses[run.arm.base], arms=arms, **options)

    printed = printed_summary(study)

    head, _, _ = printed.partition("─")
    words_of_head = head.split()
    assert "over" in words_of_head
    assert "GPT+" in words_of_head
    assert re.search(r"^quick.*\n +over slow *$", printed, re.MULTILINE)
    assert re.search(r"^anGPT.*\n(?! +over)", printed, re.MULTILINE)


def test_the_printed_table_has_no_speed_up_of_an_arm_that_has_not_ended(folder: Path) -> None:
    study = trained(folder, lambda *_: 3.0, arms=UNTUNED_ARMS, sections=["convergence"])
    for file in folder.glob("out/angpt*/run.json"):
        record = json.loads(file.read_text())
        write_json(file, record | {"status": "interrupted"})

    printed = printed_summary(study)

    assert words_of_line(printed, "anGPT ") == ["anGPT", "as", "configured", "0", "–", "–"]
