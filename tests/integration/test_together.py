"""Additions to training in the same run: averages, a ramp, noise, samples, kept checkpoints."""

from pathlib import Path

import pytest

from tests.integration.conftest import (
    KILLED,
    Train,
    assert_identical,
    assert_same_curves,
    assert_same_training_state,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
)
from tests.integration.run_files import (
    column,
    config_of,
    file_names,
    logged,
    samples_of,
    steps,
    values,
)

CALLBACKS = ("BatchRamp", "GradientNoiseScale", "TailAveraging", "Samples", "StepCheckpoints")
FRAGMENTS = """
trainer:
  accumulate_grad_batches: 4
  callbacks+:
    - class_path: anlit.training.callbacks.BatchRamp
      init_args: {schedule: {0: 1, 4: 2, 8: 4}}
---
trainer:
  callbacks+:
    - class_path: anlit.training.callbacks.GradientNoiseScale
      init_args: {every_n_steps: 2}
---
trainer:
  callbacks+:
    - class_path: anlit.training.callbacks.TailAveraging
      init_args: {share: 0.5}
---
trainer:
  callbacks+:
    - class_path: anlit.Samples
      init_args: {prompts: ["def "], max_tokens: 4}
"""
"""Files that each add callbacks. The shipped trainer/keep.yaml comes last."""
SETTINGS = (
    "--config=optimizer/muon.yaml",
    "--config=block/qk_clip.yaml",
    "--config=trainer/keep.yaml",
    "--trainer.callbacks.steps=6",
    "--model.qk_clip=0.1",
    "--model.lr_factors.embedding=2",
    "--model.base_d_model=16",
    "--trainer.max_steps=-1",
    "--max_tokens=5376",
    "--trainer.val_check_interval=4",
    "--checkpoint_every_n_steps=3",
)
"""5,376 tokens are 42 micro-batches, which the ramp makes 4 + 4 + 7 steps."""
KILLED_IN = 27
"""The second micro-batch of step 6, where Lightning counts four in each step."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("fragments")
    files = []
    for number, text in enumerate(FRAGMENTS.split("---\n")):
        file = folder / f"{number}.yaml"
        file.write_text(text)
        files.append(f"--config={file}")
    return (*files, *SETTINGS)


@pytest.fixture(scope="module")
def whole(trained: Train, settings: tuple[str, ...]) -> Path:
    return trained(*settings, model="GPT")


def test_fragments_add_their_callbacks(whole: Path) -> None:
    paths = values(config_of(whole)["trainer"]["callbacks"], "class_path")

    for path, name in zip(paths, CALLBACKS, strict=True):
        assert path.endswith(f".{name}")


def test_each_addition_does_its_work_beside_the_others(whole: Path) -> None:
    n_steps = 15

    assert last_checkpoint(whole)["global_step"] == n_steps
    assert column(whole, "train/batch_tokens") == [128.0] * 4 + [256.0] * 4 + [512.0] * 7
    assert steps(whole, "noise/trace") == [5, 7, 9, 11, 13]
    assert column(whole, "val/averaged_steps") == [0, 1, 5, 8]
    assert values(samples_of(whole), "step") == [3, 7, 11, 14]
    kept_checkpoints = file_names(whole / "checkpoints") - {"last.ckpt", "best.ckpt"}
    assert kept_checkpoints == {"step-00000006.ckpt", "step-00000012.ckpt"}


def test_a_killed_run_continues_to_the_bit(
    shards: Path, whole: Path, settings: tuple[str, ...], tmp_path: Path
) -> None:
    cut = tmp_path / "run"
    arguments = fit_arguments(shards, cut, *settings, model="GPT")
    again = [*arguments, "--max_tokens=null", "--trainer.max_steps=15", "--ckpt_path=last"]

    assert run([*arguments, *signal_at("SIGKILL", KILLED_IN)]) == KILLED
    assert run(again) == 0

    first = last_checkpoint(whole)
    second = last_checkpoint(cut)
    assert_same_training_state(first, second)
    for entry in ("current_model_state", "averaging_state"):
        assert_identical(first[entry], second[entry], entry)
    assert_same_curves(whole, cut)
    for name in ("noise/scale", "noise/trace", "train/batch_tokens", "val/averaged_steps"):
        assert logged(whole, name) == logged(cut, name)
    assert (whole / "samples.jsonl").read_text() == (cut / "samples.jsonl").read_text()
