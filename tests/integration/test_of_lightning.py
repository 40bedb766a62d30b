"""Runs with Lightning's callbacks, strategies and settings: same losses, continued to the bit."""

import shutil
from pathlib import Path

import pytest

from anlit.cli import main
from tests.integration.conftest import (
    Train,
    assert_identical,
    callback,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import DDP
from tests.integration.run_files import column

slow = pytest.mark.slow
BASE = ("--trainer.max_steps=14", "--trainer.val_check_interval=5", "--checkpoint_every_n_steps=4")
STEPS = 14


def of_lightning(name: str, /, **settings: object) -> list[str]:
    """Flags that give a run a callback of Lightning's."""
    flags = [f"--trainer.callbacks.{key}={value}" for key, value in settings.items()]
    return [f"--trainer.callbacks+=lightning.pytorch.callbacks.{name}", *flags]


EMA = of_lightning("EMAWeightAveraging", decay=0.8)
CALLBACKS = {
    "EMAWeightAveraging": EMA,
    "WeightAveraging": of_lightning("WeightAveraging"),
    "EarlyStopping": of_lightning("EarlyStopping", monitor="val/loss", patience=9),
    "LearningRateMonitor": of_lightning("LearningRateMonitor"),
    "DeviceStatsMonitor": of_lightning("DeviceStatsMonitor"),
    "Timer": of_lightning("Timer", duration="00:10:00:00"),
    "ModelSummary": of_lightning("ModelSummary"),
    "RichModelSummary": of_lightning("RichModelSummary"),
    "BasePredictionWriter": of_lightning("BasePredictionWriter"),
    "ModelCheckpoint": of_lightning("ModelCheckpoint", dirpath="{dir}", every_n_train_steps=3),
    "ThroughputMonitor": callback("integration.callbacks.OwnThroughput"),
    "LambdaCallback": callback("integration.callbacks.OwnLambda"),
    "a user's own": callback("integration.callbacks.PathFinderLogger"),
}
FAST = "EMAWeightAveraging"
MEANS = ("EMAWeightAveraging", "WeightAveraging")
TOGETHER = [flag for name, flags in CALLBACKS.items() if name not in MEANS for flag in flags]


@pytest.mark.parametrize(
    "name", [FAST, "all", *(pytest.param(name, marks=slow) for name in CALLBACKS if name != FAST)]
)
def test_a_run_with_a_callback_of_lightning_is_continued_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    flags = TOGETHER if name == "all" else CALLBACKS[name]
    settings = [*BASE, *(flag.format(dir=tmp_path / "own") for flag in flags)]
    cut = tmp_path / "cut"
    whole = trained(*settings, model="GPT")
    arguments = fit_arguments(shards, cut, *settings, model="GPT")
    checkpoint = stop_and_continue(arguments, cut, whole, signal_at("SIGKILL", 9))
    assert checkpoint["global_step"] == 8
    plain = trained(*BASE, model="GPT")
    assert column(cut, "train/loss") == column(plain, "train/loss")
    assert (column(cut, "val/loss") == column(plain, "val/loss")) == (name not in MEANS)
    if name in MEANS:
        one, two = last_checkpoint(whole), last_checkpoint(cut)
        for key in ("current_model_state", "averaging_state"):
            assert_identical(one[key], two[key], key)


@slow
def test_ranks_average_weights_alike(shards: Path, tmp_path: Path, trained: Train) -> None:
    settings = (*BASE, *EMA, *DDP)
    whole, cut = trained(*settings, model="GPT", n_ranks=2), tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, model="GPT")
    stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 6, 1), 75, n_ranks=2)


@pytest.mark.parametrize("validated", ["2", "0"])
def test_a_longer_run_goes_on_from_the_weights_and_not_from_their_mean(
    shards: Path, tmp_path: Path, trained: Train, validated: str
) -> None:
    """At its end a run puts the mean in the place of the weights, after its last checkpoint."""
    constant = ("--model.schedule.warmup=0", "--model.schedule.final=1")
    settings = [*EMA, *constant, f"--trainer.limit_val_batches={validated}"]
    run_dir = tmp_path / "run"
    shutil.copytree(trained(*settings, "--trainer.max_steps=5", model="GPT"), run_dir)
    longer = [*settings, "--trainer.max_steps=9", "--ckpt_path=last"]
    assert run(fit_arguments(shards, run_dir, *longer, model="GPT")) == 0
    whole = trained(*settings, "--trainer.max_steps=9", model="GPT")
    assert column(run_dir, "train/loss") == column(whole, "train/loss")


def test_a_run_with_a_mean_is_not_continued_without_it(
    shards: Path, tmp_path: Path, trained: Train, refusal
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained(*BASE, *EMA, model="GPT"), run_dir)
    without = ["--trainer.max_steps=20", "--ckpt_path=last"]
    error = refusal(*fit_arguments(shards, run_dir, *without, model="GPT"))
    assert "has weights that a callback averages, and trainer.callbacks averages none" in error


def test_weights_alone_begin_a_run_and_continue_none(
    shards: Path, tmp_path: Path, trained: Train, refusal
) -> None:
    folder = tmp_path / "weights"
    settings = of_lightning("ModelCheckpoint", dirpath=folder, save_weights_only=True)
    assert run(fit_arguments(shards, tmp_path / "one", *BASE, *settings)) == 0
    (file,) = folder.iterdir()
    continued = fit_arguments(shards, tmp_path / "two", *BASE, f"--ckpt_path={file}")
    error = refusal(*continued)
    assert "has weights alone (save_weights_only), and no optimizer's state" in error
    assert f"--initial_weights {file}" in error
    arguments = fit_arguments(shards, tmp_path / "three", *BASE, f"--initial_weights={file}")
    assert run(arguments) == 0


SETTINGS = {
    "detect_anomaly": "true",
    "deterministic": "true",
    "benchmark": "false",
    "use_distributed_sampler": "false",
    "inference_mode": "false",
    "num_sanity_val_steps": "2",
    "enable_model_summary": "true",
    "enable_progress_bar": "true",
    "profiler": "simple",
    "sync_batchnorm": "true",
    "min_steps": "3",
    "min_epochs": "1",
    "enable_autolog_hparams": "false",
    "limit_predict_batches": "1",
    "limit_test_batches": "1",
    "accelerator": "auto",
    "strategy": "single_device",
    "num_nodes": "1",
    "max_time": "00:10:00:00",
    "precision": "32",
    "plugins": "LightningEnvironment",
    "reload_dataloaders_every_n_epochs": "1",
    "gradient_clip_algorithm": "norm",
}
"""Arguments of the Trainer with values that change nothing that is learned."""


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=slow) for name in SETTINGS)])
def test_settings_that_change_no_number(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    """Also over epochs, at whose end the loader may be made anew."""
    epochs = ("--trainer.limit_train_batches=4", "--trainer.max_epochs=3", "--trainer.max_steps=-1")
    named = SETTINGS if name == "all" else {name: SETTINGS[name]}
    flags = [f"--trainer.{key}={value}" for key, value in named.items()]
    whole = trained(*epochs, "--trainer.val_check_interval=3")
    arguments = fit_arguments(
        shards, tmp_path / "cut", *epochs, "--trainer.val_check_interval=3", *flags
    )
    checkpoint = stop_and_continue(arguments, tmp_path / "cut", whole, signal_at("SIGTERM", 2), 75)
    assert checkpoint["global_step"] == 3


def test_a_dev_run_leaves_nothing(shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(fit_arguments(shards, run_dir, "--trainer.fast_dev_run=true")) == 0
    assert [*tmp_path.iterdir()] == []


STRATEGIES = {
    "by its class": ["--trainer.strategy=DDPStrategy"],
    "unused parameters": ["--trainer.strategy=ddp_find_unused_parameters_true"],
    "views": ["--trainer.strategy=DDPStrategy", "--trainer.strategy.gradient_as_bucket_view=true"],
    "a user's own": ["--trainer.strategy=tests.integration.callbacks.OwnDDP"],
    "sharded, by its name alone": ["--trainer.strategy=anlit.FullySharded"],
}


@pytest.mark.parametrize(
    "name",
    [
        "a user's own",
        *(pytest.param(name, marks=slow) for name in STRATEGIES if name != "a user's own"),
    ],
)
def test_a_strategy_learns_as_ddp_does_and_is_continued_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    accumulated = ("--data.batch_size=2", "--trainer.accumulate_grad_batches=2")
    settings = (*BASE, *accumulated, *STRATEGIES[name])
    whole = trained(*settings, model="GPT", n_ranks=2)
    ddp = trained(*BASE, *accumulated, *DDP, model="GPT", n_ranks=2)
    for curve in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(whole, curve) == pytest.approx(column(ddp, curve), rel=1e-5)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, model="GPT")
    stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 11, 1), 75, n_ranks=2)
