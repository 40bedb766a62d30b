"""A study with `anneal`: its runs, what kills and failures leave of them, and its section."""

import json
import math
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from anlit.checkpoints.location import is_sharded
from anlit.checkpoints.writing import give_name
from anlit.commands.annealed_runs import place
from anlit.errors import UserError
from anlit.study import annealed_results
from anlit.study.estimate import describe_plan, estimate_cost, merge_configuration
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from anlit.study.report import print_summary, write_report
from anlit.study.results import plan_runs, read_results
from anlit.study.sections import annealed
from anlit.study.sections.registry import check_sections
from anlit.study.state import read_state
from tests.compare.conftest import write_run
from tests.study.conftest import Launch, write_study
from tests.study.test_launch import finish, is_half_trained, starts
from tests.study.test_report import Page

LENGTHS = [100, 200, 400, 800]
TOKENS_PER_STEP = 8 * 256
SEEDS = (1, 2, 3)
CONSTANT = {"class_path": "anlit.Constant", "init_args": {"warmup": 0.1}}
ARMS = {
    "gpt": {"title": "GPT+", "configs": ["gpt.yaml"]},
    "angpt": {"title": "anGPT", "configs": ["angpt.yaml"]},
}
CHANGES: dict[str, Any] = {
    "arms": ARMS,
    "shared": {"configs": ["common.yaml"], "settings": {"model.init_args.schedule": CONSTANT}},
    "anneal": {"max_steps": LENGTHS, "decay": 0.2},
    "sections": ["annealed", "convergence"],
}


def annealed_study(folder: Path, **changes: Any) -> Study:
    return read_study(write_study(folder, **CHANGES | changes), None)


def test_each_measured_run_keeps_its_rate_and_is_annealed_to_each_length(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    points = {arm.name: arm.points[0] for arm in study.arms}

    stable, _ = study.measuring_runs(points)
    runs = study.annealed_runs(points)

    callback = "anlit.training.callbacks.checkpoints.StepCheckpoints"
    assert stable.settings["trainer.max_steps"] == 640
    assert stable.settings["trainer.callbacks+"] == [
        {"class_path": callback, "init_args": {"steps": [80, 160, 320, 640]}}
    ]
    assert [run.label for run in runs] == [
        f"seed=1_annealed={length}" for _ in ARMS for length in LENGTHS
    ]
    assert [run.n_stable for run in runs[:4]] == [80, 160, 320, 640]
    assert runs[0].settings == {
        "trainer.max_steps": 100,
        "seed_everything": 1,
        "data.init_args.seed": 1,
    }
    assert len({run.hash for run in plan_runs(study, points)}) == 2 + 8


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
    points = {arm.name: arm.points[0] for arm in study.arms}

    names = [
        callback["class_path"].rpartition(".")[2]
        for callback in study.measuring_runs(points)[0].settings["trainer.callbacks+"]
    ]
    run_settings = study.annealed_runs(points)[0].settings

    assert names == ["StepCheckpoints", "EarlyStopping"], "options change the last callback"
    assert run_settings["trainer.callbacks+"] == [{"class_path": "EarlyStopping"}]
    assert list(run_settings)[:2] == ["trainer.callbacks+", "trainer.callbacks.patience"]
    assert not any("schedule" in key for key in run_settings)


def test_an_annealed_run_costs_its_decay_alone(folder: Path) -> None:
    study = annealed_study(folder, pace={"flops_per_second": 1e10})
    points = {arm.name: arm.points[0] for arm in study.arms}

    costs = [estimate_cost(run) for run in study.annealed_runs(points)]
    text = describe_plan(study, 1, {}, {})

    tokens = [(length // 5) * TOKENS_PER_STEP for length in LENGTHS]
    assert [cost.tokens for cost in costs[:4]] == tokens
    assert f"measuring: 6 runs, {6 * 640 * TOKENS_PER_STEP:,} tokens" in text
    assert f"annealing: 24 runs, {6 * sum(tokens):,} tokens" in text


@pytest.mark.parametrize(("changes", "message"), [
    ({"anneal": {"decay": 0.2}}, "anneal of study.yaml is not as .*: max_steps is missing"),
    ({"anneal": {"max_steps": [100], "share": 1}}, "anneal of study.yaml has the unknown key 'share'"),
    ({"anneal": {"max_steps": []}}, "anneal of study.yaml is not as .*: max_steps is empty"),
    ({"anneal": {"max_steps": [100, 2]}}, r"anneal.max_steps of study.yaml is \[100, 2\]: give different"),
    ({"anneal": {"max_steps": [100, 100]}}, "give different numbers of steps, of which 0.2 is a step or more"),
    ({"anneal": {"max_steps": [100], "decay": 1.0}}, "anneal.decay of study.yaml is 1.0: give more than 0 and less"),
    ({"shared": {"settings": {"max_tokens": 1e6}}}, "sets max_tokens, and anneal.max_steps gives the lengths"),
    ({"arms": {"gpt": {"vary": {"trainer.max_steps": [1, 2]}}}}, "arm 'gpt' .* sets trainer.max_steps, and"),
    ({"arms": {"gpt": {"tune": {"lr": [1, 2]}}}}, "'gpt' of study.yaml has `tune`.* with the schedule anlit.WSD"),
    ({"anneal": None}, "'annealed' of study.yaml has no annealed runs: give `anneal:"),
    ({"baseline": None}, "'annealed' of study.yaml has nothing to compare with: give `baseline: ARM`"),
])  # fmt: skip
def test_mistakes_are_refused(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sections(annealed_study(folder, **changes))


SMALL = {"anneal": {"max_steps": [5, 10], "decay": 0.4}, "seeds": [1]}


def test_a_study_killed_at_random_goes_on_and_has_the_same_report(
    start: Launch, folder: Path
) -> None:
    annealed_study(folder, **SMALL)
    assert "annealing: 4 runs" in finish(start("--jobs", "2"))
    undisturbed = (folder / "out" / "report.md").read_text()
    begun_at = starts(folder / "out")
    assert {steps[0] for name, steps in begun_at.items() if "annealed=5" in name} == {3}
    assert {steps[0] for name, steps in begun_at.items() if "annealed=10" in name} == {6}
    assert "started" not in finish(start()), "nothing is trained again"
    os.rename(folder / "out", folder / "before")
    chance = random.Random(5)
    for _ in range(4):
        process = start("--jobs", "2", step=0.03)
        while process.wait(0.01) is None and not is_half_trained(folder / "out"):
            pass
        if process.wait(chance.uniform(0.2, 0.8)) is None:
            process.kill(signal.SIGKILL, group=True)
            process.wait()
    finish(start("--jobs", "2"))
    assert not list((folder / "out").glob("*/mishaps"))
    assert (folder / "out" / "report.md").read_text() == undisturbed


def test_annealed_runs_without_a_checkpoint_fail_and_are_tried_again(
    start: Launch, folder: Path
) -> None:
    study = annealed_study(folder, **SMALL)
    points = {arm.name: arm.points[0] for arm in study.arms}
    finish(start("--jobs", "2"))
    run = study.annealed_runs(points)[0]
    shutil.rmtree(folder / "out" / run.name)
    kept = folder / "out" / run.stable.name / "checkpoints"
    os.rename(kept, folder / "elsewhere")

    assert "does not exist" not in finish(start(), code=1)

    assert read_state(folder / "out" / run.name).reason == (
        f"out/{run.stable.name}/checkpoints/step=3.ckpt does not exist: anneal needs it to begin"
    )
    os.rename(folder / "elsewhere", kept)
    assert f"{run.name}: started" in finish(start("--retry_failed"))


def test_runs_of_another_study_are_taken_over(start: Launch, folder: Path) -> None:
    annealed_study(folder, **SMALL)
    finish(start("--jobs", "2"))
    os.rename(folder / "out", folder / "first")
    text = (folder / "first" / "report.md").read_text()
    shutil.rmtree(next(folder.glob("first/angpt*annealed=5*")))

    out = finish(start("--reuse", "first"))

    assert out.count(": started") == 0
    assert out.count(": taken from first") == 6
    assert out.count(": taken from first/report.json") == 1
    assert [line for line in text.splitlines() if "made by" not in line] == [
        line
        for line in (folder / "out" / "report.md").read_text().splitlines()
        if "made by" not in line
    ]


def test_a_sharded_checkpoint_is_placed_whole_and_replaced_by_the_next(folder: Path) -> None:
    """A sharded checkpoint is a link to a folder; the run's own next checkpoint takes its name."""
    kept = folder / "stable" / "checkpoints"
    shards = kept / ".sharded" / "step=3-1"
    shards.mkdir(parents=True)
    for name in ("meta.pt", "shard-00001.safetensors"):
        (shards / name).write_text(name)
    (kept / "step=3.ckpt").symlink_to(".sharded/step=3-1", target_is_directory=True)
    last = folder / "annealed" / "checkpoints" / "last.ckpt"

    place(kept / "step=3.ckpt", last)

    assert is_sharded(last)
    assert {file.name for file in last.iterdir()} == {"meta.pt", "shard-00001.safetensors"}
    next_file = last.with_name("next")
    next_file.write_text("a later checkpoint")
    give_name(next_file, last)
    assert last.read_text() == "a later checkpoint"
    assert is_sharded(kept / "step=3.ckpt")


def law(tokens: float, speedup: float, seed: int) -> float:
    """A loss that falls as a power of tokens: a line in the logarithms."""
    return (1 + 0.01 * seed) * 20 * (speedup * tokens) ** -0.15


SPEEDUPS = {("angpt", 1): 1.3, ("angpt", 2): 1.4, ("angpt", 3): 1.35}


def train(study: Study, output: Path, falling: float = 0.0) -> None:
    """Write all runs. A stable run is 0.2 nats above the law.

    The speed-up is `SPEEDUPS` at 100 steps, and has the factor `falling_factor` for twice the
    steps.
    """
    points = {arm.name: arm.points[0] for arm in study.arms}
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


def rows_of(page: Page, arm: str) -> list[list[str]]:
    return [row for row in page.rows if row[0] == arm and len(row) == 7]


def report(study: Study) -> Page:
    return Page(write_report(read_results(study, Path("out"))).with_suffix(".md"))


def test_the_section_recovers_the_speed_up_of_its_runs(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")

    page = report(study)

    rows = rows_of(page, "anGPT")
    assert len(rows) == len(LENGTHS)
    logarithms = np.log([*SPEEDUPS.values()])
    low, high = np.exp(stats.ttest_1samp(logarithms, 0).confidence_interval())
    exact = f"{np.exp(logarithms.mean()):.2f} ({low:.2f} … {high:.2f})"
    assert [row[5] for row in rows] == [exact, exact, exact, "> 1.00"]
    assert [row[1] for row in rows] == ["205k", "410k", "819k", "1.64M"]
    assert rows[0][2] == f"{100 * TOKENS_PER_STEP / 10_000:.3g}"
    losses = [law(100 * TOKENS_PER_STEP, SPEEDUPS["angpt", seed], seed) for seed in SEEDS]
    assert rows[0][3] == f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
    assert f"At 819k tokens {exact}: ahead." in page.text
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

    row = rows_of(report(study), "anGPT")[1]

    tokens = np.arange(20, 201, 20) * TOKENS_PER_STEP
    loss = np.array([0.2 + law(x, speedup, 1) for x in tokens])
    loss[-1] = law(tokens[-1], speedup, 1)
    target = law(tokens[-1], 1.0, 1)
    assert row[6] == f"{tokens[-1] / np.interp(-target, -loss, tokens):.2f}"


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
    points = {arm.name: arm.points[0] for arm in study.arms}
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
    assert curve.tokens.tolist() == [n * TOKENS_PER_STEP for n in expected]
    assert curve.loss.tolist() == [0.0] * 16 + [1.0] * 4, "the stable run until the branch"


def test_a_falling_speed_up_is_told(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out", falling=0.1)

    text = report(study).text

    logarithms = np.log([falling_factor(0.1, seed) for seed in SEEDS])
    low, high = np.exp(stats.ttest_1samp(logarithms, 0).confidence_interval())
    factor = f"{np.exp(logarithms.mean()):.2f} ({low:.2f} … {high:.2f})"
    assert f"- anGPT: × {factor} for twice the tokens, over 3 lengths: the speed-up falls." in text


def test_the_console_and_the_record_have_the_annealed_speed_ups(folder: Path) -> None:
    study = annealed_study(folder)
    train(study, folder / "out")
    shutil.rmtree(next(folder.glob("out/angpt_seed=3_annealed=800*")))
    (lost,) = folder.glob("out/angpt_seed=2_annealed=400*")
    (lost / "run.json").write_text('{"status": "failed", "error": "no memory"}')
    results = read_results(study, Path("out"))
    console = Console(width=80, record=True)

    print_summary(results, console)
    write_report(results)

    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 80
    assert "2 of 3 seeds" in printed
    raw = json.loads((folder / "out" / "report.json").read_text())["annealed"]
    by_length = {point["max_steps"]: point for point in raw[0]["points"]}
    assert by_length[100]["speedup_annealed"] == pytest.approx([*SPEEDUPS.values()])
    assert by_length[400]["speedup_annealed"][1] is None
    assert len(by_length[800]["losses"]) == 2
    assert by_length[800]["bounds"] == [">"]


def test_curves_of_other_validation_tokens_are_not_compared(folder: Path) -> None:
    arms = {
        "gpt": ARMS["gpt"],
        "angpt": ARMS["angpt"] | {"settings": {"data.init_args.val_blocks": 64}},
    }
    study = annealed_study(folder, arms=arms)
    train(study, folder / "out")

    rows = rows_of(report(study), "anGPT")

    assert {(row[5], row[6]) for row in rows} == {("– (validated differently)",) * 2}


def test_an_arm_that_failed_at_every_length_has_no_value(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    train(study, folder / "out")
    for lost in folder.glob("out/angpt*annealed*"):
        (lost / "run.json").write_text('{"status": "failed", "error": "no memory"}')

    page = report(study)

    assert [row[1:4] + row[5:] for row in rows_of(page, "anGPT")] == [
        ["–"] * 4 + ["not reached"]
    ] * 4
    assert "anGPT: fewer than two lengths have a value on every seed" in page.text


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
    assert baseline.get_ydata() == pytest.approx(
        [np.mean([law(n * TOKENS_PER_STEP, 1, seed) for seed in SEEDS]) for n in LENGTHS]
    )
    assert all(arm.get_ydata() < baseline.get_ydata())
    exact, *_caps, bound, crossing, one = speedups.get_lines()
    mean = math.exp(np.log([*SPEEDUPS.values()]).mean())
    assert exact.get_ydata() == pytest.approx([mean] * 3)
    assert bound.get_ydata() == pytest.approx([1.0])
    assert len(crossing.get_xdata()) == 4
    assert one.get_ydata() == [1, 1]
