"""What no run can have is refused before data are prepared, which may take hours."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml

from anlit.cli import main
from anlit.data.preparation import prepare as preparation

TINY = [
    "fit", "--model=GPT", "--model.context_length=16", "--model.n_layers=1", "--model.n_heads=2",
    "--model.d_model=8", "--data=TextFiles", "--data.source=texts", "--data.path=prepared",
    "--data.batch_size=2", "--trainer.accelerator=cpu", "--run_dir=run",
]  # fmt: skip
UNLIMITED = "--trainer.max_steps=-1"
NOISE_SCALE = "anlit.training.callbacks.GradientNoiseScale"
WITHOUT_PACKAGE = "tests.integration.callbacks.NeedsPackage"
LATE_IN_STUDY = {
    "trainer.callbacks": [
        {
            "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
            "init_args": {"update_starting_at_step": 10},
        }
    ]
}
LATE = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.update_starting_at_step=10"]
WIDE = ["--model.d_model=32", "--model.runtime.float8=rowwise"]
PER_HEAD = ["--model.attention_gate=per_head"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer.devices=0"], "trainer.devices=0 is out of range: give 1 or more, or -1"),
        (["--trainer.devices=x"], "trainer.devices=x is not a number of devices: give 1 or more"),
        (["--trainer.devices=[0,1]"], "trainer.devices is not a number of processes: give"),
        (["--trainer.accelerator=mps"], "trainer.accelerator=mps is not one of anlit's, which"),
        (["--trainer.accelerator=tpu"], "trainer.accelerator=tpu is not one of anlit's, which"),
        (["--trainer.accelerator=XLAAccelerator"], "trainer.accelerator=XLAAccelerator is not"),
        (["--trainer.accelerator=procesor"], "trainer.accelerator=procesor is not one of anlit's"),
        (["--trainer.limit_train_batches=1.5"], "invalid value 1.5 for limit_train_batches"),
        (
            ["--trainer.callbacks+=TailAveraging", "--trainer.callbacks.share=2"],
            "TailAveraging has share=2.0: give more than 0, at most 1",
        ),
        (
            ["--trainer.callbacks+=LossGuard", "--trainer.gradient_clip_algorithm=value"],
            "LossGuard needs the gradient norm",
        ),
        (["--trainer.overfit_batches=1"], "trainer.overfit_batches=1 cannot repeat batches"),
        (
            [f"--trainer.callbacks+={WITHOUT_PACKAGE}"],
            "error: NeedsPackage: the package nowhere is not installed",
        ),
        (["--model.n_heads=3"], "model.d_model=8 is not divisible by model.n_heads=3"),
        (
            ["--model.optimizer=torch.optim.SGD", "--model.optimizer.nesterov=true"],
            "model.optimizer: Nesterov momentum requires a momentum",
        ),
        (["--data.context_length=32"], "data.context_length=32 is not model.context_length=16"),
        (["--data.context_schedule={0: 5}"], "length 5 at step 0, which does not divide the"),
        (["--initial_weights=nowhere"], "nowhere does not exist"),
        (
            ["--max_tokens=1e6", "--tokens_per_parameter=20", UNLIMITED],
            "both give the length of the run: leave one out",
        ),
        (["--max_tokens=10", UNLIMITED], "10 tokens are less than a step of 32: give more"),
        ([f"--trainer.callbacks+={NOISE_SCALE}"], "GradientNoiseScale compares a step with its"),
        (
            ["--trainer.strategy=anlit.FullySharded", "--trainer.strategy.replicas=2"],
            "replicas=2 does not divide the number of ranks, 1",
        ),
        ([*LATE, "--trainer.max_steps=9"], "averages nothing, because the last of the run's 9"),
        ([*LATE, UNLIMITED, "--max_tokens=320"], "the last of the run's 10 steps is number 9"),
        (["--model.kernel=triton"], "kernel='triton' cannot do attention Plain: it runs on a GPU"),
        (["--model.kernel=flex"], "FlexAttention has no backward pass on CPU; choose auto"),
        (
            ["--model.runtime.float8=rowwise"],
            "sides that are multiples of 16, and 0.W_q is 8 × 8: choose another d_model, d_ff",
        ),
        (
            [*WIDE, "--model.n_heads=2", *PER_HEAD],
            "and 0.output.W_g is 2 × 32: choose another d_model, d_ff, d_head or number of heads",
        ),
    ],
)
@pytest.mark.parametrize("vocabulary", [[], ["--model.vocab_size=320"]], ids=["found", "given"])
def test_a_setting_that_no_run_can_have_is_refused_before_data_are_prepared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal,
    options: list[str],
    words: str,
    vocabulary: list[str],
) -> None:
    def prepare(*arguments: object) -> NoReturn:
        raise AssertionError("data are prepared")

    monkeypatch.setattr(preparation, "prepare", prepare)
    monkeypatch.chdir(tmp_path)

    assert words in refusal(*TINY, *vocabulary, *options)

    assert not Path("run").exists()


def test_float8_without_torchao_is_refused_before_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.chdir(tmp_path)

    assert "runtime.float8=rowwise needs torchao (No module" in refusal(*TINY, *WIDE)

    assert not Path("prepared").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trainer.max_steps": 10, **LATE_IN_STUDY}, "averages nothing, because the last of the"),
        ({"trainer.callbacks": [{"class_path": NOISE_SCALE}]}, "GradientNoiseScale compares"),
        ({"model.init_args.kernel": "flex"}, "FlexAttention has no backward pass on CPU"),
        ({"max_tokens": 10, "trainer.max_steps": -1}, "10 tokens are less than a step of"),
        ({"trainer.devices": 0}, "trainer.devices=0 is out of range: give 1 or more, or -1"),
        ({"trainer.devices": []}, "trainer.devices=[] is not a number of devices: give 1 or more"),
        ({"trainer.devices": [0, 1]}, "trainer.devices is not a number of processes: give"),
        (
            {"trainer.devices": "x", "trainer.accelerator": "gpu"},
            "trainer.devices=x is not a number of devices: give 1 or more, or -1 for all devices",
        ),
        (
            {"trainer.limit_val_batches": 1.5, "trainer.accelerator": "gpu"},
            "invalid value 1.5 for limit_val_batches",
        ),
        ({"trainer.max_time": "noon"}, "trainer.max_time is not a duration: give DD:HH:MM:SS"),
        (
            {"trainer.callbacks": [{"class_path": WITHOUT_PACKAGE}]},
            "NeedsPackage: the package nowhere is not installed",
        ),
    ],
)
def test_an_arm_that_cannot_start_is_refused_before_the_first_run_of_a_study(
    tmp_path: Path, refusal, settings: dict[str, Any], words: str
) -> None:
    common = {"trainer.accelerator": "cpu", "data.init_args.path": str(tmp_path / "prepared")}
    arms = {
        "first": {"configs": ["model/gpt.yaml", "data/python.yaml"], "settings": common},
        "second": {
            "configs": ["model/gpt.yaml", "data/python.yaml"],
            "settings": common | settings,
        },
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"arms": arms, "seeds": [1], "sections": ["tuning"]}))

    error = refusal("study", "--config", path, "--output", tmp_path / "out", "--dry_run")

    assert f"arm 'second' of {path}: " in error
    assert words in error


def test_a_study_makes_the_callbacks_of_runs_with_one_trainer_once(tmp_path: Path) -> None:
    """Its constructor may have effects. The plan has six runs with two Trainers."""
    notes = tmp_path / "notes"

    def arm(line: str, tune: dict[str, list[float]]) -> dict[str, Any]:
        callback = {
            "class_path": "tests.integration.callbacks.NotesConstruction",
            "init_args": {"path": str(notes), "line": line},
        }
        settings = {
            "trainer.accelerator": "cpu",
            "trainer.callbacks": [callback],
            "data.init_args.path": str(tmp_path / "prepared"),
        }
        configs = ["model/gpt.yaml", "data/python.yaml"]
        return {"configs": configs, "settings": settings, "tune": tune}

    rates = {"model.init_args.optimizer.init_args.lr": [0.001, 0.002, 0.004]}
    arms = {"first": arm("one", rates), "second": arm("two", rates)}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"arms": arms, "seeds": [1], "sections": ["tuning"]}))

    assert main(["study", "--config", str(path), "--dry_run"]) == 0

    assert notes.read_text().split() == ["one", "two"]


def test_a_study_for_gpus_is_checked_on_a_machine_without(
    tmp_path: Path,
) -> None:
    """The check leaves no setting of the runs in this process, which starts other runs."""
    environment = dict(os.environ)
    settings = {
        "trainer.accelerator": "gpu",
        "trainer.devices": [0, 1],
        "trainer.strategy": "anlit.FullySharded",
        "trainer.deterministic": True,
        "data.init_args.path": str(tmp_path / "prepared"),
    }
    arms = {"wide": {"configs": ["model/gpt.yaml", "data/python.yaml"], "settings": settings}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"arms": arms, "seeds": [1], "sections": ["tuning"]}))

    assert main(["study", "--config", str(path), "--dry_run"]) == 0

    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
