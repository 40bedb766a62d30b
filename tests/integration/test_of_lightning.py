"""Runs with Lightning's callbacks, strategies and settings: same losses, continued to the bit."""

import shutil
from pathlib import Path

import pytest

from anlit.cli import main
from tests.integration.cases import slow, slow_cases, slow_except
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

BASE = ("--trainer.max_steps=14", "--trainer.val_check_interval=5", "--checkpoint_every_n_steps=4")


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
MEANS = ("EMAWeightAveraging", "WeightAveraging")


def flags_of(name: str, folder: Path) -> list[str]:
    """Flags for a callback, or for all that average no weights. One writes into `folder`."""
    flags = []
    for key, flags_of_callback in CALLBACKS.items():
        if key == name or (name == "all" and key not in MEANS):
            flags += flags_of_callback
    return [flag.format(dir=folder) for flag in flags]


# test_weight_averages.py kills a run with EMAWeightAveraging.
@pytest.mark.parametrize("name", ["all", *slow_cases(CALLBACKS)])
def test_a_run_with_a_callback_of_lightning_is_continued_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    settings = [*BASE, *flags_of(name, tmp_path / "own")]
    cut = tmp_path / "cut"
    whole = trained(*settings, model="GPT")
    arguments = fit_arguments(shards, cut, *settings, model="GPT")

    checkpoint = stop_and_continue(arguments, cut, whole, signal_at("SIGKILL", 9))

    assert checkpoint["global_step"] == 8
    plain = trained(*BASE, model="GPT")
    assert column(cut, "train/loss") == column(plain, "train/loss")
    assert (column(cut, "val/loss") == column(plain, "val/loss")) == (name not in MEANS)
    if name in MEANS:
        first, second = last_checkpoint(whole), last_checkpoint(cut)
        for key in ("current_model_state", "averaging_state"):
            assert_identical(first[key], second[key], key)


@slow
def test_ranks_average_weights_alike(shards: Path, tmp_path: Path, trained: Train) -> None:
    settings = (*BASE, *EMA, *DDP)
    whole = trained(*settings, model="GPT", n_ranks=2)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, model="GPT")
    stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 6, 1), 75, n_ranks=2)


CONSTANT = ("--model.schedule.warmup=0", "--model.schedule.final=1")
NOT_VALIDATED = (*EMA, *CONSTANT, "--trainer.limit_val_batches=0")


@pytest.mark.parametrize("validated", ["0", *slow_cases(["2"])])
def test_a_longer_run_goes_on_from_the_weights_and_not_from_their_mean(
    shards: Path, tmp_path: Path, trained: Train, validated: str
) -> None:
    """At its end a run puts the mean in the place of the weights, after its last checkpoint."""
    settings = (*EMA, *CONSTANT, f"--trainer.limit_val_batches={validated}")
    shorter = trained(*settings, "--trainer.max_steps=5", model="GPT")
    run_dir = shutil.copytree(shorter, tmp_path / "run")
    longer = [*settings, "--trainer.max_steps=9", "--ckpt_path=last"]

    assert run(fit_arguments(shards, run_dir, *longer, model="GPT")) == 0

    whole = trained(*settings, "--trainer.max_steps=9", model="GPT")
    assert column(run_dir, "train/loss") == column(whole, "train/loss")


def test_a_run_with_a_mean_is_not_continued_without_it(
    shards: Path, tmp_path: Path, trained: Train, refusal
) -> None:
    averaged = trained(*NOT_VALIDATED, "--trainer.max_steps=5", model="GPT")
    run_dir = shutil.copytree(averaged, tmp_path / "run")
    without = ["--trainer.max_steps=20", "--ckpt_path=last"]
    error = refusal(*fit_arguments(shards, run_dir, *without, model="GPT"))
    assert "has weights that a callback averages, and trainer.callbacks averages none" in error


def test_weights_alone_begin_a_run_and_continue_none(
    shards: Path, tmp_path: Path, trained: Train, refusal
) -> None:
    folder = tmp_path / "weights"
    settings = of_lightning("ModelCheckpoint", dirpath=folder, save_weights_only=True)
    short = "--trainer.max_steps=2"
    assert main(fit_arguments(shards, tmp_path / "one", short, *settings)) == 0
    (file,) = folder.iterdir()

    error = refusal(*fit_arguments(shards, tmp_path / "two", f"--ckpt_path={file}"))

    assert "has weights alone (save_weights_only), and no optimizer's state" in error
    assert f"--initial_weights {file}" in error
    initial = f"--initial_weights={file}"
    assert main(fit_arguments(shards, tmp_path / "three", short, initial)) == 0


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


@pytest.mark.parametrize("name", ["all", *slow_cases(SETTINGS)])
def test_settings_that_change_no_number(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    """Also over epochs, at whose end the loader may be made anew."""
    epochs = (
        "--trainer.limit_train_batches=4",
        "--trainer.max_epochs=3",
        "--trainer.max_steps=-1",
        "--trainer.val_check_interval=3",
    )
    flags = []
    for key, value in SETTINGS.items():
        if name in ("all", key):
            flags.append(f"--trainer.{key}={value}")
    whole = trained(*epochs)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *epochs, *flags)

    checkpoint = stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 2), 75)

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
ACCUMULATED = (*BASE, "--data.batch_size=2", "--trainer.accumulate_grad_batches=2")


@pytest.mark.parametrize("name", slow_except(["a user's own"], STRATEGIES))
def test_a_strategy_learns_as_ddp_does(trained: Train, name: str) -> None:
    run_dir = trained(*ACCUMULATED, *STRATEGIES[name], model="GPT", n_ranks=2)
    ddp = trained(*ACCUMULATED, *DDP, model="GPT", n_ranks=2)

    for curve in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(run_dir, curve) == pytest.approx(column(ddp, curve), rel=1e-5)


@slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_continued_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    """test_signals.py continues runs with DDP among the fast tests."""
    settings = (*ACCUMULATED, *STRATEGIES[name])
    whole = trained(*settings, model="GPT", n_ranks=2)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, model="GPT")

    stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 11, 1), 75, n_ranks=2)
