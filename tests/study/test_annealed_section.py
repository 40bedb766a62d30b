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
from tests.compare.reports import geometric_t_interval, t_interval
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
from tests.study.conftest import ANGPT_ARM, GPT_ARM, first_points, shared_with
from tests.study.reports import with_interval

pytestmark = pytest.mark.usefixtures("unsaved")
ANNEALED = "speed-up, annealed"
CROSSING = "speed-up, crossing"
DIFFERENCE = "minus the baseline's (95 %)"


def test_the_section_recovers_the_speed_up_of_its_runs(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")

    page = report(study)

    rows = page.rows_of("anGPT", ANNEALED)
    exact = geometric_mean(list(SPEEDUPS.values()))
    assert [row["tokens"] for row in rows] == ["205k", "410k", "819k", "1.64M"]
    assert [row[ANNEALED] for row in rows] == [exact, exact, exact, "> 1.00"]
    assert f"At 819k tokens {exact}: ahead." in page.text
    assert page.pictures[0] == "1-annealed.png"

    shortest, *_, longest = rows
    losses = annealed_losses("angpt", 100)
    assert shortest["per parameter"] == f"{100 * TOKENS_PER_STEP / 10_000:.3g}"
    assert shortest["annealed loss"] == f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"

    gaps = annealed_losses("angpt", 800) - annealed_losses("gpt", 800)
    low, high = t_interval(gaps)
    difference = with_interval("+.4f", np.mean(gaps), low, high)
    assert longest[DIFFERENCE] == difference
    sentence = f"At 1.64M tokens > 1.00: its loss minus the baseline's is {difference}."
    assert sentence in page.text


def annealed_losses(arm: str, n_steps: int) -> np.ndarray:
    """The loss of each seed, by the law."""
    losses = []
    for seed in SEEDS:
        speedup = SPEEDUPS.get((arm, seed), 1.0)
        losses.append(law(n_steps * TOKENS_PER_STEP, speedup, seed))
    return np.array(losses)


@pytest.mark.parametrize("speedup", [1.3, 6.0])
def test_the_crossing_is_on_the_whole_curves(folder: Path, monkeypatch, speedup: float) -> None:
    """By hand, from the stable run until the branch and the annealed run behind it.

    At 1.3 the arm has the baseline's loss in its fall, at 6 in its stable run.
    """
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), speedup)
    study = annealed_study(folder, seeds=[1])
    train(study, folder / "out")

    _, at_200_steps, *_ = report(study).rows_of("anGPT", CROSSING)

    tokens = np.arange(20, 201, 20) * TOKENS_PER_STEP
    stable_losses = 0.2 + law(tokens[:-1], speedup, 1)
    end = tokens[-1]
    losses = np.append(stable_losses, law(end, speedup, 1))
    target = law(end, 1.0, 1)
    crossing = np.interp(-target, -losses, tokens)
    assert at_200_steps[CROSSING] == f"{end / crossing:.2f}"


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
    changes = {
        "seeds": [1],
        "shared": shared_with(settings),
        "anneal": {"max_steps": [200, 400]},
    }
    study = annealed_study(folder, **changes)
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
    results = read_results(study, Path("out"))

    arm = annealed_results.read_arm(results, study.arms[0])

    curve = arm.curves["seed=1"][200]
    assert curve is not None
    n_micro_batches = curve.tokens / TOKENS_PER_STEP
    assert n_micro_batches.tolist() == [*range(10, 101, 10), *range(140, 501, 40)]
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
    record = json.loads((folder / "out" / "report.json").read_text())
    (comparison,) = record["annealed"]
    at_100, _, at_400, at_800 = comparison["points"]
    assert at_100["speedup_annealed"] == pytest.approx([*SPEEDUPS.values()])
    assert at_400["speedup_annealed"][1] is None
    assert len(at_800["losses"]) == 2
    assert at_800["bounds"] == [">"]
    assert at_800["test"] is None, "a bound has no interval"
    mean_gap = np.mean(at_100["losses"]) - np.mean(at_100["baseline_losses"])
    assert at_100["loss_difference"]["difference"] == pytest.approx(mean_gap)


def test_curves_of_other_validation_tokens_are_not_compared(folder: Path) -> None:
    other_tokens = {"settings": {"data.init_args.val_blocks": 64}}
    arms = {"gpt": GPT_ARM, "angpt": ANGPT_ARM | other_tokens}
    study = annealed_study(folder, arms=arms)
    train(study, folder / "out")

    rows = report(study).rows_of("anGPT", ANNEALED)

    assert len(rows) == 4
    for row in rows:
        assert row[DIFFERENCE] == "–"
        assert row[ANNEALED] == "– (validated differently)"
        assert row[CROSSING] == "– (validated differently)"


def test_an_arm_that_failed_at_every_length_has_no_value(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    train(study, folder / "out")
    for lost_folder in folder.glob("out/angpt*annealed*"):
        fail(lost_folder)

    page = report(study)

    rows = page.rows_of("anGPT", ANNEALED)
    assert len(rows) == 4
    for row in rows:
        for column in ("tokens", "per parameter", "annealed loss", DIFFERENCE, ANNEALED):
            assert row[column] == "–"
        assert row[CROSSING] == "not reached"
    assert "anGPT: fewer than two lengths have a value on every seed" in page.text


def test_runs_without_an_annealed_loss_are_named(folder: Path) -> None:
    """A run diverged. The last loss of a run that was stopped early is not an annealed loss."""
    study = annealed_study(folder)
    train(study, folder / "out")
    diverged = next(folder.glob("out/angpt_seed=1_annealed=100*"))
    metrics = diverged / "metrics.csv"
    *rows, _ = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*rows, "19,,nan,204800,1,nan", ""]))
    stopped = next(folder.glob("out/angpt_seed=2_annealed=200*"))
    record = json.loads((stopped / "run.json").read_text())
    early = {"stopped_early": "190 of 200 steps, by Timer"}
    (stopped / "run.json").write_text(json.dumps(record | early))

    page = report(study)

    at_100, at_200, _, _ = page.rows_of("anGPT", ANNEALED)
    for row in (at_100, at_200):
        assert row["annealed loss"] == "2 of 3 seeds"
        assert row[ANNEALED] == "2 of 3 seeds"
    names = f"{diverged.name} (failed), {stopped.name} (ended early, after 190 of 200"
    assert f"- LOST {names}" in page.text.replace("\\", "")


def test_before_any_annealed_run_the_section_says_so(folder: Path) -> None:
    page = report(annealed_study(folder))

    assert "No pair of annealed runs has finished yet." in page.text


def test_the_picture_has_exact_values_bounds_and_crossings(folder: Path, keep_figures) -> None:
    figures = keep_figures(annealed)
    study = annealed_study(folder)
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    losses, speedups = figures[0].axes
    baseline, arm = losses.get_lines()
    for n_steps, mean in zip(LENGTHS, baseline.get_ydata(), strict=True):
        expected = annealed_losses("gpt", n_steps).mean()
        assert mean == pytest.approx(expected)
    assert all(arm.get_ydata() < baseline.get_ydata())
    bound, exact, *_caps, crossing, line_at_one = speedups.get_lines()
    mean = stats.gmean(list(SPEEDUPS.values()))
    assert exact.get_ydata() == pytest.approx([mean] * 3)
    assert bound.get_ydata() == pytest.approx([1.0])
    assert len(crossing.get_xdata()) == 4
    assert line_at_one.get_ydata() == [1, 1]


def test_intervals_of_several_arms_stand_side_by_side(folder: Path, keep_figures) -> None:
    figures = keep_figures(annealed)
    arms = {"gpt": GPT_ARM, "angpt": ANGPT_ARM, "ngpt": ANGPT_ARM | {"title": "nGPT"}}
    study = annealed_study(folder, arms=arms)
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = figures[0].axes
    angpt, ngpt = speedups.containers
    angpt_tokens = angpt.lines[0].get_xdata()[:3]
    ngpt_tokens = ngpt.lines[0].get_xdata()[:3]
    assert all(angpt_tokens < ngpt_tokens)
    middles = np.sqrt(angpt_tokens * ngpt_tokens)
    tokens = np.array(LENGTHS[:3]) * TOKENS_PER_STEP
    assert middles == pytest.approx(tokens)


def test_a_wide_interval_does_not_flatten_the_picture(
    folder: Path, monkeypatch, keep_figures
) -> None:
    figures = keep_figures(annealed)
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), 0.7)
    study = annealed_study(folder, seeds=[1, 2])
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = figures[0].axes
    of_seeds = [0.7, SPEEDUPS["angpt", 2]]
    mean = stats.gmean(of_seeds)
    _, high = geometric_t_interval(of_seeds)
    bottom, top = speedups.get_ylim()
    assert high > 50
    assert bottom < mean < 1 < top < 2


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
    assert text.count(sentence) == 1
    assert recomputed.count(sentence) == 1
    assert len(recomputed.splitlines()) == len(text.splitlines())
