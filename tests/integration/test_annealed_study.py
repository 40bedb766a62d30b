"""A study with `anneal` over real trainings: its annealed runs equal `anlit fit --anneal`."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main
from anlit.study.plan import AnnealedRun
from anlit.study.read_study import read_study
from tests.integration.conftest import VOCABULARY, assert_identical, callback, run
from tests.integration.ranks import ForkedCommand
from tests.integration.run_files import column, file_names, logged, steps, values

CONSTANT = {"class_path": "anlit.Constant", "init_args": {"warmup": 0.25}}
COSINE = {"class_path": "anlit.Cosine", "init_args": {"warmup": 0.25}}
LATE = {"class_path": "anlit.Constant", "init_args": {"warmup": 0.9}}
SHAPE = {"vocab_size": VOCABULARY, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 32}
COMMON = {
    "model": {"init_args": SHAPE},
    "trainer": {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "val_check_interval": 6,
        "limit_val_batches": 2,
    },
    "checkpoint_every_n_steps": 2,
}
PEAK = 1.0e-3
"""The rate of paper/gpt.yaml and paper/angpt.yaml."""


def write_study(folder: Path, shards: Path, schedule: dict[str, Any]) -> Path:
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": str(shards), "batch_size": 4}}
    settings = {"model.init_args.schedule": schedule}
    common = folder / "common.yaml"
    common.write_text(yaml.safe_dump(COMMON | {"data": data}))
    study = {
        "baseline": "GPT",
        "arms": {
            "GPT": {"configs": ["paper/gpt.yaml"]},
            "AnGPT": {"configs": ["paper/angpt.yaml"]},
        },
        "shared": {"configs": [str(common)], "settings": settings},
        "anneal": {"max_steps": [10, 20], "decay": 0.2},
        "seeds": [1],
        "sections": ["annealed"],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def study_file(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study whose runs are trained, in the folder `out` beside it.

    The runs of test_search.py are processes that `anlit study` itself starts.
    """
    folder = tmp_path_factory.mktemp("study")
    path = write_study(folder, shards, CONSTANT)
    options = ["--config", str(path), "--output", str(folder / "out"), "--jobs=2", "--threads=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anlit.study.launch.subprocess", SimpleNamespace(Popen=ForkedCommand))
        assert main(["study", *options]) == 0
    return path


def annealed_run(study_file: Path, max_steps: int) -> AnnealedRun:
    """The first arm's run of that length."""
    study = read_study(str(study_file), None)
    points = {}
    for arm in study.arms:
        points[arm.name] = arm.points[0]
    runs = study.annealed_runs(points)
    return next(run for run in runs if run.max_steps == max_steps)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"])


def assert_same_weights(first: Path, second: Path) -> None:
    assert_identical(weights(first), weights(second), "weights")


def test_stable_runs_keep_the_rate_and_checkpoints_and_the_others_fall(study_file: Path) -> None:
    out = study_file.parent / "out"
    run = annealed_run(study_file, 20)

    stable = column(out / run.stable.name, "train/learning_rate")
    falling = column(out / run.name, "train/learning_rate")

    assert stable[3:16] == pytest.approx([PEAK] * 13)
    assert steps(out / run.name, "train/learning_rate") == [16, 17, 18, 19]
    assert falling == pytest.approx([PEAK * 0.75, PEAK * 0.5, PEAK * 0.25, 0])
    checkpoints = file_names(out / run.stable.name / "checkpoints")
    assert checkpoints == {"step-00000008.ckpt", "step-00000016.ckpt", "last.ckpt", "best.ckpt"}


def test_its_report_has_the_losses_of_the_annealed_runs(study_file: Path) -> None:
    out = study_file.parent / "out"

    report = json.loads((out / "report.json").read_text())

    (compared,) = report["annealed"]
    assert values(compared["points"], "max_steps") == [10, 20]
    for point in compared["points"]:
        length = point["max_steps"]
        losses = column(out / annealed_run(study_file, length).name, "val/loss")
        assert point["baseline_losses"] == [losses[-1]]
        assert point["tokens"] == length * 4 * 32


def test_an_annealed_run_is_that_of_fit_to_the_bit(study_file: Path, tmp_path: Path) -> None:
    out = study_file.parent / "out"
    annealed = annealed_run(study_file, 20)
    stable = out / annealed.stable.name
    checkpoint = stable / "checkpoints" / "step-00000016.ckpt"
    arguments = ["fit", "--config", str(stable / "config.yaml"), "--ckpt_path", str(checkpoint)]

    assert run([*arguments, "--anneal=0.25", f"--run_dir={tmp_path / 'by_hand'}"]) == 0

    assert_same_weights(out / annealed.name, tmp_path / "by_hand")


@pytest.mark.slow
def test_an_annealed_run_that_is_killed_goes_on_to_the_same_weights(
    study_file: Path, tmp_path: Path
) -> None:
    out = study_file.parent / "out"
    annealed = annealed_run(study_file, 20)
    cut = tmp_path / annealed.name
    (cut / "checkpoints").mkdir(parents=True)
    shutil.copytree(out / annealed.stable.name, tmp_path / annealed.stable.name)
    begin = tmp_path / annealed.stable.name / "checkpoints" / "step-00000016.ckpt"
    shutil.copy(begin, cut / "checkpoints" / "last.ckpt")
    arguments = ["fit", *annealed.options(cut), "--ckpt_path=last"]
    kill = callback("integration.callbacks.Signalled", name="SIGTERM", stage="train", batch=18)

    assert run([*arguments, *kill]) == 75
    assert len(column(cut, "train/learning_rate")) < 4
    assert run(arguments) == 0

    assert_same_weights(out / annealed.name, cut)
    rates = logged(out / annealed.name, "train/learning_rate")
    assert logged(cut, "train/learning_rate") == rates


@pytest.mark.parametrize("schedule", [LATE, pytest.param(COSINE, marks=pytest.mark.slow)])
def test_a_rate_that_changes_after_the_first_branch_is_refused(
    shards: Path, tmp_path: Path, refusal, schedule: dict
) -> None:
    path = write_study(tmp_path, shards, schedule)

    error = refusal("study", "--config", path, "--output", tmp_path / "out", "--dry_run")

    assert f"arm 'GPT' of {path}: model.init_args.schedule changes the rate after step 8" in error
    assert "give anlit.Constant, with a warm-up that ends before" in error


def test_step_checkpoints_need_steps(shards: Path, refusal, tmp_path: Path) -> None:
    error = refusal(
        "fit",
        "--config=paper/gpt.yaml",
        "--data=TokenShards",
        f"--data.path={shards}",
        "--trainer.callbacks+=anlit.training.callbacks.StepCheckpoints",
        "--trainer.callbacks.steps=[0, 5]",
        f"--run_dir={tmp_path / 'run'}",
    )

    assert "StepCheckpoints.steps=[0, 5] is out of range: give steps from 1 on" in error
