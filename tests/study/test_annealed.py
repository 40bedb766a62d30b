"""A study with `anneal`: its runs, what kills and failures leave of them, and its section."""

import json
import math
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from anlit.checkpoints.location import is_sharded
from anlit.checkpoints.writing import give_name
from anlit.commands.annealed_runs import place
from anlit.commands.study import main
from anlit.errors import UserError
from anlit.study import annealed_results
from anlit.study.estimate import describe_plan, estimate_cost, merge_configuration
from anlit.study.plan import Study
from anlit.study.report import print_summary, write_report
from anlit.study.results import plan_runs, read_results
from anlit.study.sections import annealed
from anlit.study.sections.registry import check_sections
from anlit.study.state import read_state
from tests.compare.conftest import write_run
from tests.study.conftest import UNTUNED_ARMS, Launch, attributes, changed_study, first_points
from tests.study.reports import Page, with_interval
from tests.study.test_launch import finish, report_lines, starts, wait_until_half_trained

pytestmark = pytest.mark.usefixtures("unsaved")
LENGTHS = [100, 200, 400, 800]
TOKENS_PER_STEP = 8 * 256
SEEDS = (1, 2, 3)
CONSTANT = {"class_path": "anlit.Constant", "init_args": {"warmup": 0.1}}
CHANGES: dict[str, Any] = {
    "arms": UNTUNED_ARMS,
    "shared": {"configs": ["common.yaml"], "settings": {"model.init_args.schedule": CONSTANT}},
    "anneal": {"max_steps": LENGTHS, "decay": 0.2},
    "sections": ["annealed", "convergence"],
}


def annealed_study(folder: Path, **changes: Any) -> Study:
    return changed_study(folder, **CHANGES | changes)


def test_each_measured_run_keeps_its_rate_and_is_annealed_to_each_length(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    points = first_points(study)

    stable, _ = study.measuring_runs(points)
    runs = study.annealed_runs(points)

    callback = {
        "class_path": "anlit.training.callbacks.checkpoints.StepCheckpoints",
        "init_args": {"steps": [80, 160, 320, 640]},
    }
    assert stable.settings["trainer.max_steps"] == 640
    assert stable.settings["trainer.callbacks+"] == [callback]
    labels = [f"seed=1_annealed={length}" for length in LENGTHS]
    assert attributes(runs, "label") == 2 * labels
    assert attributes(runs, "n_stable") == 2 * [80, 160, 320, 640]
    assert runs[0].settings == {
        "trainer.max_steps": 100,
        "seed_everything": 1,
        "data.init_args.seed": 1,
    }
    hashes = attributes(plan_runs(study, points), "hash")
    assert len({*hashes}) == 2 + 8


def test_an_annealed_run_goes_on_from_the_schedule_of_its_stable_run(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    run = study.annealed_runs({"gpt": study.arms[0].points[0]})[1]
    config = {"model": {"init_args": {"schedule": CONSTANT}}, "trainer": {"max_steps": 640}}
    stable_folder = folder / "out" / run.stable.name
    write_run(stable_folder, config, {}, [], lambda x: x)

    *options, schedule = run.options(folder / "out" / run.name)

    assert options[-4:] == [
        "--trainer.max_steps=200",
        "--seed_everything=1",
        "--data.init_args.seed=1",
        f"--run_dir={folder / 'out' / run.name}",
    ]
    key, _, value = schedule.partition("=")
    assert key == "--model.init_args.schedule"
    assert json.loads(value) == {
        "class_path": "anlit.Annealed",
        "init_args": {
            "schedule": CONSTANT,
            "begin": 160,
            "planned": 640,
            "shape": "linear",
            "final": 0.0,
        },
    }


def test_another_callback_of_an_arm_stays(folder: Path) -> None:
    settings = {
        "trainer.callbacks+": {"class_path": "EarlyStopping"},
        "trainer.callbacks.patience": 2,
        "model.schedule.warmup": 0.1,
    }
    study = annealed_study(folder, shared={"configs": ["common.yaml"], "settings": settings})
    points = first_points(study)

    callbacks = study.measuring_runs(points)[0].settings["trainer.callbacks+"]
    run_settings = study.annealed_runs(points)[0].settings

    assert callbacks[0]["class_path"].endswith(".StepCheckpoints")
    assert callbacks[1]["class_path"] == "EarlyStopping", "options change the last callback"
    assert run_settings["trainer.callbacks+"] == [{"class_path": "EarlyStopping"}]
    assert list(run_settings)[:2] == ["trainer.callbacks+", "trainer.callbacks.patience"]
    assert "schedule" not in " ".join(run_settings)


def test_step_checkpoints_that_an_arm_asks_for_stay(folder: Path) -> None:
    own = {
        "class_path": "anlit.training.callbacks.checkpoints.StepCheckpoints",
        "init_args": {"steps": 50},
    }
    settings = {"trainer.callbacks+": own}
    study = annealed_study(folder, shared={"configs": ["common.yaml"], "settings": settings})

    run = study.annealed_runs(first_points(study))[0]

    assert run.settings["trainer.callbacks+"] == [own]


def test_an_annealed_run_costs_its_decay_alone(folder: Path) -> None:
    study = annealed_study(folder, pace={"flops_per_second": 1e10})
    points = first_points(study)

    costs = list(map(estimate_cost, study.annealed_runs(points)))
    text = describe_plan(study, 1, {}, {})

    tokens = [20 * TOKENS_PER_STEP, 40 * TOKENS_PER_STEP, 80 * TOKENS_PER_STEP]
    tokens.append(160 * TOKENS_PER_STEP)
    assert attributes(costs[:4], "tokens") == tokens
    assert f"measuring: 6 runs, {6 * 640 * TOKENS_PER_STEP:,} tokens" in text
    assert f"annealing: 24 runs, {6 * sum(tokens):,} tokens" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anneal": {"decay": 0.2}}, "anneal.max_steps of study.yaml is .*: give different"),
        (
            {"anneal": {"max_steps": [100], "share": 1}},
            "anneal of study.yaml has the unknown key 'share'",
        ),
        ({"anneal": {"max_steps": []}}, "anneal.max_steps of study.yaml is .*: give different"),
        (
            {"anneal": {"max_steps": [100, 2]}},
            r"anneal.max_steps of study.yaml is \[100, 2\]: give different",
        ),
        (
            {"anneal": {"max_steps": [100, 100]}},
            "give different numbers of steps, of which 0.2 is a step or more",
        ),
        (
            {"anneal": {"max_steps": [100], "decay": 1.0}},
            "anneal.decay of study.yaml is 1.0: give more than 0 and less",
        ),
        (
            {"shared": {"settings": {"max_tokens": 1e6}}},
            "sets max_tokens, and anneal.max_steps gives the lengths",
        ),
        (
            {"arms": {"gpt": {"vary": {"trainer.max_steps": [1, 2]}}}},
            "arm 'gpt' .* sets trainer.max_steps, and",
        ),
        (
            {"arms": {"gpt": {"tune": {"trainer.max_steps": [1, 2]}}}},
            "arm 'gpt' .* sets trainer.max_steps, and",
        ),
        (
            {"arms": {"gpt": {"tune": {"trainer.callbacks+": [None, "EarlyStopping"]}}}},
            r"tune of arm 'gpt' .* has trainer.callbacks\+, to which `anneal` adds",
        ),
        (
            {"arms": {"gpt": {"tune": {"lr": [1, 2]}}}},
            "'gpt' of study.yaml has `tune`.* with the schedule anlit.WSD",
        ),
        ({"anneal": None}, "'annealed' of study.yaml has no annealed runs: give `anneal:"),
        (
            {"baseline": None},
            "'annealed' of study.yaml has nothing to compare with: give `baseline: ARM`",
        ),
    ],
)
def test_mistakes_are_refused(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sections(annealed_study(folder, **changes))


SMALL = {"anneal": {"max_steps": [5, 10], "decay": 0.4}, "seeds": [1]}


def test_a_study_killed_at_random_goes_on_and_has_the_same_report(
    start: Launch, folder: Path
) -> None:
    annealed_study(folder, **SMALL)
    output = folder / "out"
    assert "annealing: 4 runs" in finish(start("--jobs", "2"))
    undisturbed = report_lines(output)
    for name, steps in starts(output).items():
        if "annealed" in name:
            assert steps == ([3] if "annealed=5" in name else [6])
    assert "started" not in finish(start()), "nothing is trained again"
    output.rename(folder / "before")

    chance = random.Random(5)
    for _ in range(4):
        process = start("--jobs", "2", step=0.03)
        wait_until_half_trained(process, output)
        if process.wait(chance.uniform(0.2, 0.8)) is None:
            process.kill(signal.SIGKILL, group=True)
            process.wait()
    finish(start("--jobs", "2"))

    assert not list(output.glob("*/mishaps"))
    assert report_lines(output) == undisturbed


def test_annealed_runs_without_a_checkpoint_fail_and_are_tried_again(
    start: Launch, folder: Path
) -> None:
    study = annealed_study(folder, **SMALL)
    points = first_points(study)
    finish(start("--jobs", "2"))
    output = folder / "out"
    run = study.annealed_runs(points)[0]
    shutil.rmtree(output / run.name)
    checkpoints = output / run.stable.name / "checkpoints"
    moved = checkpoints.rename(folder / "elsewhere")

    assert "does not exist" not in finish(start(), code=1)

    source = f"out/{run.stable.name}/checkpoints/step-00000003.ckpt"
    reason = f"{source} does not exist: anneal needs it to begin"
    assert read_state(output / run.name).reason == reason
    moved.rename(checkpoints)
    assert f"{run.name}: started" in finish(start("--retry_failed"))


def test_runs_of_another_study_are_taken_over(start: Launch, folder: Path) -> None:
    annealed_study(folder, **SMALL)
    finish(start("--jobs", "2"))
    first = (folder / "out").rename(folder / "first")
    shutil.rmtree(next(first.glob("angpt*annealed=5*")))

    printed = finish(start("--reuse", "first"))

    assert printed.count(": started") == 0
    assert printed.count(": taken from first") == 6
    assert printed.count(": taken from first/report.json") == 1
    assert report_lines(folder / "out") == report_lines(first)


def test_a_sharded_checkpoint_is_placed_whole_and_replaced_by_the_next(folder: Path) -> None:
    """A sharded checkpoint is a link to a folder; the run's own next checkpoint takes its name."""
    checkpoints = folder / "stable" / "checkpoints"
    shards = checkpoints / ".sharded" / "step=3-1"
    shards.mkdir(parents=True)
    for name in ("meta.pt", "shard-00001.safetensors"):
        (shards / name).write_text(name)
    (checkpoints / "step-00000003.ckpt").symlink_to(".sharded/step=3-1", target_is_directory=True)
    last = folder / "annealed" / "checkpoints" / "last.ckpt"

    place(checkpoints / "step-00000003.ckpt", last)

    assert is_sharded(last)
    assert sorted(attributes(last.iterdir(), "name")) == ["meta.pt", "shard-00001.safetensors"]
    next_file = last.with_name("next")
    next_file.write_text("a later checkpoint")
    give_name(next_file, last)
    assert last.read_text() == "a later checkpoint"
    assert is_sharded(checkpoints / "step-00000003.ckpt")


def law(tokens: float, speedup: float, seed: int) -> float:
    """A loss that falls as a power of tokens: a line in the logarithms."""
    return (1 + 0.01 * seed) * 20 * (speedup * tokens) ** -0.15


SPEEDUPS = {("angpt", 1): 1.3, ("angpt", 2): 1.4, ("angpt", 3): 1.35}


def train(study: Study, output: Path, falling: float = 0.0) -> None:
    """Write all runs. A stable run is 0.2 nats above the law.

    The speed-up is `SPEEDUPS` at 100 steps, and has the factor `falling_factor` for twice the
    steps.
    """
    points = first_points(study)
    for run in plan_runs(study, points):
        seed = run.seed.shown["seed"]
        peak_speedup = SPEEDUPS.get((run.arm.name, seed), 1.0)
        n_steps = run.settings["trainer.max_steps"]
        curve = []
        for step in range(20, n_steps + 1, 20):
            if step > run.n_inherited:
                tokens = step * TOKENS_PER_STEP
                curve.append((tokens, 0.2 + law(tokens, peak_speedup, seed)))
        if run.n_inherited:
            speedup = peak_speedup
            if run.arm.name == "angpt":
                speedup *= falling_factor(falling, seed) ** math.log2(n_steps / 100)
            tokens = n_steps * TOKENS_PER_STEP
            curve[-1] = (tokens, law(tokens, speedup, seed))
        record = {"parameters": 10_000}
        write_run(output / run.name, merge_configuration(run), record, curve, lambda x: x / 1000)


def falling_factor(falling: float, seed: int) -> float:
    """The factor for twice the steps, 2^-falling, a little different for each seed."""
    return float(2 ** -(falling * (1 + 0.1 * (seed - 2))))


def report(study: Study) -> Page:
    return Page(write_report(read_results(study, Path("out"))).with_suffix(".md"))


def geometric_mean(values: Sequence[float]) -> str:
    """`1.35 (1.31 … 1.39)`: the mean and the t-interval of the logarithms."""
    logarithms = np.log(values)
    interval = stats.ttest_1samp(logarithms, 0).confidence_interval()
    low, high = np.exp(interval)
    return f"{np.exp(logarithms.mean()):.2f} ({low:.2f} … {high:.2f})"


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
        curve = []
        for step in range(run.n_inherited + 10, n_steps + 1, 10):
            tokens = (step if step <= 100 else 100 + 4 * (step - 100)) * TOKENS_PER_STEP
            curve.append((tokens, float(run.n_inherited > 0)))
        config = merge_configuration(run)
        write_run(folder / "out" / run.name, config, {"parameters": 1}, curve, lambda x: x)

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


def test_the_picture_has_exact_values_bounds_and_crossings(
    folder: Path, monkeypatch, drawn
) -> None:
    monkeypatch.setattr(annealed, "save", lambda figure, path: drawn.append(figure))
    study = annealed_study(folder)
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    losses, speedups = drawn[0].axes
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


def test_intervals_of_several_arms_stand_side_by_side(folder: Path, monkeypatch, drawn) -> None:
    monkeypatch.setattr(annealed, "save", lambda figure, path: drawn.append(figure))
    ngpt = UNTUNED_ARMS["angpt"] | {"title": "nGPT"}
    study = annealed_study(folder, arms=UNTUNED_ARMS | {"ngpt": ngpt})
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = drawn[0].axes
    angpt, ngpt_tokens = (container.lines[0].get_xdata()[:3] for container in speedups.containers)
    assert all(angpt < ngpt_tokens)
    middles = np.sqrt(angpt * ngpt_tokens)
    assert middles == pytest.approx(np.array(LENGTHS[:3]) * TOKENS_PER_STEP)


def test_a_wide_interval_does_not_flatten_the_picture(folder: Path, monkeypatch, drawn) -> None:
    monkeypatch.setattr(annealed, "save", lambda figure, path: drawn.append(figure))
    monkeypatch.setitem(SPEEDUPS, ("angpt", 1), 0.7)
    study = annealed_study(folder, seeds=[1, 2])
    train(study, folder / "out")

    annealed.annealed(read_results(study, Path("out")), {})

    _, speedups = drawn[0].axes
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
