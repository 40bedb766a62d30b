"""The annealed runs of a study, also after kills and failures."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from anlit.checkpoints.location import is_sharded
from anlit.checkpoints.writing import give_name
from anlit.commands.annealed_runs import place
from anlit.errors import UserError
from anlit.study.estimate import describe_plan, estimate_cost
from anlit.study.results import plan_runs
from anlit.study.sections.registry import check_sections
from anlit.study.state import read_state
from tests.compare.conftest import write_run
from tests.study.annealing import (
    CONSTANT,
    LENGTHS,
    TOKENS_PER_STEP,
    annealed_study,
)
from tests.study.conftest import Launch, attributes, first_points, shared_with
from tests.study.test_launch import finish, report_lines, starts, wait_until_half_trained

pytestmark = pytest.mark.usefixtures("unsaved")


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
    assert len(set(hashes)) == 2 + 8


def test_an_annealed_run_goes_on_from_the_schedule_of_its_stable_run(folder: Path) -> None:
    study = annealed_study(folder, seeds=[1])
    _, run, *_ = study.annealed_runs(first_points(study))
    config = {
        "model": {"init_args": {"schedule": CONSTANT}},
        "trainer": {"max_steps": 640},
    }
    stable_folder = folder / "out" / run.stable.name
    write_run(stable_folder, config, {}, {})

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
    study = annealed_study(folder, shared=shared_with(settings))
    points = first_points(study)

    stable, *_ = study.measuring_runs(points)
    annealed, *_ = study.annealed_runs(points)

    step_checkpoints, last = stable.settings["trainer.callbacks+"]
    assert step_checkpoints["class_path"].endswith(".StepCheckpoints")
    assert last["class_path"] == "EarlyStopping", "options change the last callback"
    assert annealed.settings["trainer.callbacks+"] == [{"class_path": "EarlyStopping"}]
    callback, option, *_ = annealed.settings
    assert callback == "trainer.callbacks+"
    assert option == "trainer.callbacks.patience"
    assert "schedule" not in " ".join(annealed.settings)


def test_step_checkpoints_that_an_arm_asks_for_stay(folder: Path) -> None:
    own = {
        "class_path": "anlit.training.callbacks.checkpoints.StepCheckpoints",
        "init_args": {"steps": 50},
    }
    study = annealed_study(folder, shared=shared_with({"trainer.callbacks+": own}))

    run, *_ = study.annealed_runs(first_points(study))

    assert run.settings["trainer.callbacks+"] == [own]


def test_an_annealed_run_costs_its_decay_alone(folder: Path) -> None:
    study = annealed_study(folder, pace={"flops_per_second": 1e10})
    points = first_points(study)

    costs = list(map(estimate_cost, study.annealed_runs(points)))
    text = describe_plan(study, 1, {}, {})

    tokens = [n_steps * TOKENS_PER_STEP for n_steps in (20, 40, 80, 160)]
    stable_tokens = 640 * TOKENS_PER_STEP
    assert attributes(costs[:4], "tokens") == tokens
    assert f"measuring: 6 runs, {6 * stable_tokens:,} tokens" in text
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


SMALL = {
    "anneal": {"max_steps": [5, 10], "decay": 0.4},
    "seeds": [1],
}


def test_a_study_killed_at_random_goes_on_and_has_the_same_report(
    start: Launch, folder: Path
) -> None:
    annealed_study(folder, **SMALL)
    output = folder / "out"
    assert "annealing: 4 runs" in finish(start("--jobs", "2"))
    undisturbed = report_lines(output)
    for name, steps in starts(output).items():
        if "annealed=5" in name:
            assert steps == [3]
        elif "annealed=10" in name:
            assert steps == [6]
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
    run, *_ = study.annealed_runs(points)
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
    """A sharded checkpoint is a link to a folder. The run's next checkpoint takes its name."""
    checkpoints = folder / "stable" / "checkpoints"
    shards = checkpoints / ".sharded" / "step=3-1"
    shards.mkdir(parents=True)
    for name in ("meta.pt", "shard-00001.safetensors"):
        (shards / name).write_text(name)
    stable = checkpoints / "step-00000003.ckpt"
    stable.symlink_to(".sharded/step=3-1", target_is_directory=True)
    last = folder / "annealed" / "checkpoints" / "last.ckpt"

    place(stable, last)

    assert is_sharded(last)
    assert sorted(attributes(last.iterdir(), "name")) == ["meta.pt", "shard-00001.safetensors"]
    next_file = last.with_name("next")
    next_file.write_text("a later checkpoint")
    give_name(next_file, last)
    assert last.read_text() == "a later checkpoint"
    assert is_sharded(stable)
