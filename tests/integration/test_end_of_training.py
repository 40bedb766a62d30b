"""The end of training is validated, once, whether or not the interval divides its steps; settings are logged."""

import signal
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, logged, run

STOP = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=24")


def short(shards: Path, run_dir: Path, *extra: str) -> list[str]:
    """25 steps, a validation every 10."""
    return fit_arguments(shards, run_dir, "--trainer.max_steps=25", "--trainer.val_check_interval=10", *extra)


def validated(run_dir: Path) -> list[int]:
    """The steps of metrics.csv that have a validation loss; TensorBoard has the same."""
    steps = [step for step, _ in logged(run_dir, "val/loss")]
    assert [event.step for event in EventAccumulator(str(run_dir)).Reload().Scalars("val/loss")] == steps
    return steps


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(short(shards, run_dir)) == 0
    return run_dir


def test_the_last_step_is_validated(shards: Path, undisturbed: Path) -> None:
    assert validated(undisturbed) == [9, 19, 24]
    assert run(short(shards, undisturbed, "--ckpt_path=last")) == 0
    assert validated(undisturbed) == [9, 19, 24], "a finished run is not validated again"


@pytest.mark.parametrize(
    ("name", "code"), [("SIGKILL", -signal.SIGKILL), pytest.param("SIGINT", 1, marks=pytest.mark.slow)]
)
def test_a_run_that_is_stopped_at_its_last_step_is_validated_once(
    shards: Path, tmp_path: Path, undisturbed: Path, name: str, code: int
) -> None:
    run_dir = tmp_path / "run"
    assert run(short(shards, run_dir, *STOP, f"--trainer.callbacks.name={name}")) == code
    assert run(short(shards, run_dir, "--ckpt_path=last")) == 0
    assert logged(run_dir, "val/loss") == logged(undisturbed, "val/loss")
    assert validated(run_dir) == [9, 19, 24]
    assert_same_training_state(last_checkpoint(undisturbed), last_checkpoint(run_dir))


def test_a_longer_run_goes_on_from_an_end_between_two_intervals(shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run(short(shards, run_dir, "--trainer.max_steps=13")) == 0
    assert run(short(shards, run_dir, "--ckpt_path=last")) == 0
    assert validated(run_dir) == [9, 12, 19, 24]
    assert [step for step, _ in logged(run_dir, "train/loss")] == [*range(25)]


def test_an_end_by_epochs_is_validated(shards: Path, tmp_path: Path) -> None:
    """Two epochs of 7 steps, a validation every 3 of an epoch."""
    epochs = ("--trainer.max_steps=-1", "--trainer.max_epochs=2", "--trainer.limit_train_batches=7",
              "--trainer.val_check_interval=3", "--trainer.check_val_every_n_epoch=1")  # fmt: skip
    assert run(short(shards, tmp_path / "run", *epochs)) == 0
    assert validated(tmp_path / "run") == [2, 5, 9, 12, 13]


def test_settings_are_in_hparams_yaml_and_in_tensorboard(undisturbed: Path) -> None:
    """The tab takes val/loss, its only metric, from the curve."""
    told = yaml.safe_load((undisturbed / "hparams.yaml").read_text())
    assert (told["model"]["architecture"], told["model"]["context_length"], told["seed_everything"]) == ("AnGPT", 32, 1)
    contents = EventAccumulator(str(undisturbed)).Reload().summary_metadata
    session, experiment = (
        HParamsPluginData.FromString(contents[f"_hparams_/{name}"].plugin_data.content)
        for name in ("session_start_info", "experiment")
    )
    shown = session.session_start_info.hparams
    assert shown["model.d_model"].number_value == 32
    assert shown["model.optimizer.class_path"].string_value == "anlit.AdamW"
    assert (shown["data.batch_size"].number_value, shown["trainer.max_steps"].number_value) == (4, 25)
    assert (shown["seed_everything"].number_value, shown["trainer.precision"].string_value) == (1, "32-true")
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == ["val/loss"]
