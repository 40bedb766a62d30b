"""The section `annealed` of a study: its speed-ups, tables and picture."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from anlit.commands.study import main
from anlit.study import annealed_results
from anlit.study.estimate import merge_configuration
from anlit.study.report import print_summary, write_report
from anlit.study.results import plan_runs, read_results
from anlit.study.sections import annealed
from tests.compare.conftest import write_run
from tests.study.annealing import (
    CONSTANT,
    LENGTHS,
    SEEDS,
    SPEEDUPS,
    TOKENS_PER_STEP,
    annealed_study,
    falling_factor,
    geometric_mean,
    law,
    report,
    train,
)
from tests.study.conftest import UNTUNED_ARMS, first_points
from tests.study.reports import with_interval

pytestmark = pytest.mark.usefixtures("unsaved")


def test_the_section_recovers_the_speed_up_of_its_runs(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")

    page = report(study)

    rows = page.rows_of("anGPT", 8)
    exact = geometric_mean(list(SPEEDUPS.values()))
    _, tokens, _, _, _, differences, speedups, _ = zip(*rows, strict=True)
    assert tokens == ("205k", "410k", "819k", "1.64M")
    assert speedups == (exact, exact, exact, "> 1.00")
    assert rows[0][2] == f"{100 * TOKENS_PER_STEP / 10_000:.3g}"
    losses = [law(100 * TOKENS_PER_STEP, SPEEDUPS["angpt", seed], seed) for seed in SEEDS]
    assert rows[0][3] == f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
    assert f"At 819k tokens {exact}: ahead." in page.text
    gaps = []
    for seed in SEEDS:
        tokens_at_end = 800 * TOKENS_PER_STEP
        speedup = SPEEDUPS["angpt", seed]
        gaps.append(law(tokens_at_end, speedup, seed) - law(tokens_at_end, 1.0, seed))
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
    difference = with_interval("+.4f", np.mean(gaps), low, high)
    assert differences[-1] == difference
    longest = f"At 1.64M tokens > 1.00: its loss minus the baseline's is {difference}."
    assert longest in page.text
    assert page.pictures[0] == "1-annealed.png"


@pytest.mark.parametrize("speedup", [1.3, 6.0])
def test_the_crossing_is_that_of_the_whole_curves(
    folder: Path, monkeypatch, speedup: float
) -> None:
    """By hand, from the stable run until the branch and the annealed run behind it.

    At 1.3 the arm has the baseline's loss in its fall, at 6 in its stable run.
    """
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), speedup)
    study = annealed_study(folder, seeds=[1])
    train(study, folder / "out")

    row = report(study).rows_of("anGPT", 8)[1]

    tokens = np.arange(20, 201, 20) * TOKENS_PER_STEP
    loss = np.array([0.2 + law(x, speedup, 1) for x in tokens])
    loss[-1] = law(tokens[-1], speedup, 1)
    target = law(tokens[-1], 1.0, 1)
    assert row[7] == f"{tokens[-1] / np.interp(-target, -loss, tokens):.2f}"


RAMP = {
    "class_path": "anlit.training.callbacks.BatchRamp",
    "init_args": {"schedule": {0: 1, 100: 4}},
}


def test_the_crossing_counts_the_tokens_of_a_ramp(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stable run counts until step 160, which has 340 of the 500 micro-batches, not 80 %."""
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), 1.0)
    settings = {
        "model.init_args.schedule": CONSTANT,
        "trainer.accumulate_grad_batches": 4,
        "trainer.callbacks+": [RAMP],
    }
    shared = {"configs": ["common.yaml"], "settings": settings}
    study = annealed_study(folder, seeds=[1], shared=shared, anneal={"max_steps": [200, 400]})
    points = first_points(study)
    for run in plan_runs(study, points):
        n_steps = run.settings["trainer.max_steps"]
        loss = 1.0 if run.n_inherited else 0.0
        losses = {}
        for step in range(run.n_inherited + 10, n_steps + 1, 10):
            n_micro_batches = step + 3 * max(0, step - 100)
            losses[n_micro_batches * TOKENS_PER_STEP] = loss
        config = merge_configuration(run)
        write_run(folder / "out" / run.name, config, {"parameters": 1}, losses)

    arm = annealed_results.read_arm(read_results(study, Path("out")), study.arms[0])

    curve = arm.curves["seed=1"][200]
    assert curve is not None
    expected = [*range(10, 101, 10), *range(140, 501, 40)]
    assert (curve.tokens / TOKENS_PER_STEP).tolist() == expected
    assert curve.loss.tolist() == [0.0] * 16 + [1.0] * 4, "the stable run until the branch"


def test_a_falling_speed_up_is_told(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out", falling=0.1)

    text = report(study).text

    factor = geometric_mean([falling_factor(0.1, seed) for seed in SEEDS])
    assert f"- anGPT: × {factor} for twice the tokens, over 3 lengths: the speed-up falls." in text


def fail(folder: Path) -> None:
    """Let a run have failed."""
    (folder / "run.json").write_text('{"status": "failed", "error": "no memory"}')


def test_the_console_and_the_record_have_the_annealed_speed_ups(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")
    shutil.rmtree(next(folder.glob("out/angpt_seed=3_annealed=800*")))
    fail(next(folder.glob("out/angpt_seed=2_annealed=400*")))
    results = read_results(study, Path("out"))
    console = Console(width=80, record=True)

    print_summary(results, console)
    write_report(results)

    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 80
    assert "2 of 3 seeds" in printed
    raw = json.loads((folder / "out" / "report.json").read_text())["annealed"]
    at_100, _, at_400, at_800 = raw[0]["points"]
    assert at_100["speedup_annealed"] == pytest.approx([*SPEEDUPS.values()])
    assert at_400["speedup_annealed"][1] is None
    assert len(at_800["losses"]) == 2
    assert at_800["bounds"] == [">"]
    assert at_800["test"] is None, "a bound has no interval"
    gaps = np.subtract(at_100["losses"], at_100["baseline_losses"])
    assert at_100["loss_difference"]["difference"] == pytest.approx(gaps.mean())


def test_curves_of_other_validation_tokens_are_not_compared(folder: Path) -> None:
    other_tokens = {"settings": {"data.init_args.val_blocks": 64}}
    angpt = UNTUNED_ARMS["angpt"] | other_tokens
    study = annealed_study(folder, arms=UNTUNED_ARMS | {"angpt": angpt})
    train(study, folder / "out")

    rows = report(study).rows_of("anGPT", 8)

    for row in rows:
        assert row[5] == "–"
        assert row[6] == row[7] == "– (validated differently)"


def test_an_arm_that_failed_at_every_length_has_no_value(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    train(study, folder / "out")
    for lost_folder in folder.glob("out/angpt*annealed*"):
        fail(lost_folder)

    page = report(study)

    rows = page.rows_of("anGPT", 8)
    assert len(rows) == 4
    for _, tokens, per_parameter, loss, _, difference, annealed_speedup, crossing in rows:
        assert tokens == per_parameter == loss == difference == annealed_speedup == "–"
        assert crossing == "not reached"
    assert "anGPT: fewer than two lengths have a value on every seed" in page.text


def test_runs_without_an_annealed_loss_are_named(folder: Path) -> None:
    """One diverged; one was stopped before its rate was 0, and its last loss is no annealed one."""
    study = annealed_study(folder)
    train(study, folder / "out")
    diverged = next(folder.glob("out/angpt_seed=1_annealed=100*"))
    table = (diverged / "metrics.csv").read_text().splitlines()
    (diverged / "metrics.csv").write_text("\n".join([*table[:-1], "19,,nan,204800,1,nan", ""]))
    stopped = next(folder.glob("out/angpt_seed=2_annealed=200*"))
    record = json.loads((stopped / "run.json").read_text())
    early = {"stopped_early": "190 of 200 steps, by Timer"}
    (stopped / "run.json").write_text(json.dumps(record | early))

    page = report(study)

    at_100, at_200, _, _ = page.rows_of("anGPT", 8)
    assert at_100[3] == at_100[6] == at_200[3] == at_200[6] == "2 of 3 seeds"
    names = f"{diverged.name} (failed), {stopped.name} (ended early, after 190 of 200"
    assert f"- LOST {names}" in page.text.replace("\\", "")


def test_before_any_annealed_run_the_section_says_so(folder: Path) -> None:
    assert "No pair of annealed runs has finished yet." in report(annealed_study(folder)).text


def test_the_picture_has_exact_values_bounds_and_crossings(folder: Path, keep_figures) -> None:
    figures = keep_figures(annealed)
    study = annealed_study(folder)
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    losses, speedups = figures[0].axes
    baseline, arm = losses.get_lines()
    for length, mean in zip(LENGTHS, baseline.get_ydata(), strict=True):
        expected = [law(length * TOKENS_PER_STEP, 1, seed) for seed in SEEDS]
        assert mean == pytest.approx(np.mean(expected))
    assert all(arm.get_ydata() < baseline.get_ydata())
    bound, exact, *_caps, crossing, line_at_one = speedups.get_lines()
    mean = stats.gmean(list(SPEEDUPS.values()))
    assert exact.get_ydata() == pytest.approx([mean] * 3)
    assert bound.get_ydata() == pytest.approx([1.0])
    assert len(crossing.get_xdata()) == 4
    assert line_at_one.get_ydata() == [1, 1]


def test_intervals_of_several_arms_stand_side_by_side(folder: Path, keep_figures) -> None:
    figures = keep_figures(annealed)
    ngpt = UNTUNED_ARMS["angpt"] | {"title": "nGPT"}
    study = annealed_study(folder, arms=UNTUNED_ARMS | {"ngpt": ngpt})
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = figures[0].axes
    angpt, ngpt_tokens = (container.lines[0].get_xdata()[:3] for container in speedups.containers)
    assert all(angpt < ngpt_tokens)
    middles = np.sqrt(angpt * ngpt_tokens)
    assert middles == pytest.approx(np.array(LENGTHS[:3]) * TOKENS_PER_STEP)


def test_a_wide_interval_does_not_flatten_the_picture(
    folder: Path, monkeypatch, keep_figures
) -> None:
    figures = keep_figures(annealed)
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), 0.7)
    study = annealed_study(folder, seeds=[1, 2])
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = figures[0].axes
    mean = stats.gmean([0.7, SPEEDUPS["angpt", 2]])
    _, high = stats.ttest_1samp(np.log([0.7, SPEEDUPS["angpt", 2]]), 0).confidence_interval()
    assert np.exp(high) > 50
    low, high = speedups.get_ylim()
    assert low < mean < 1 < high < 2


def test_a_recomputed_report_still_says_that_its_comparisons_are_of_stable_runs(
    folder: Path,
) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")
    text = report(study).text
    sentence = "The rate of these runs has not fallen"
    assert f"## Stable runs: {study.comparisons[0].title}\n\n{sentence}" in text

    assert main(["--recompute", "out"]) == 0

    recomputed = (folder / "out" / "report.md").read_text()
    assert recomputed.count(sentence) == text.count(sentence) == 1
    assert len(recomputed.splitlines()) == len(text.splitlines())
