"""The logs of a run: validation at the end, settings, lines of progress, meetings of ranks."""

import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import distributed

from anlit import AnGPT
from anlit.cli import main
from anlit.training.callbacks.progress import RunProgress
from tests.data.modules import quiet_trainer
from tests.integration import ranks
from tests.integration.conftest import Train, fit_arguments
from tests.integration.run_files import (
    lines_with,
    logged,
    model_settings_of,
    record_of,
    steps,
    tensorboard_steps,
)
from tests.nn.models.tiny import Logged, batches, fit, tiny

SHORT = ("--trainer.max_steps=25", "--trainer.val_check_interval=10")


def validated(run_dir: Path) -> list[int]:
    """Return the steps in metrics.csv with a validation loss. TensorBoard has the same."""
    assert tensorboard_steps(run_dir, "val/loss") == steps(run_dir, "val/loss")
    return steps(run_dir, "val/loss")


def test_a_power_cut_takes_no_validation_before_the_checkpoint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has of metrics.csv what it had at the last fsync: rows written later are gone."""
    on_disk: dict[str, bytes] = {}
    fsync = os.fsync

    def synchronise(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        on_disk[path.name] = path.read_bytes()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronise)
    arguments = fit_arguments(shards, tmp_path, *SHORT, "--ckpt_path=last")
    assert main(arguments) == 0
    assert validated(tmp_path) == [9, 19, 24]
    (tmp_path / "metrics.csv").write_bytes(on_disk.get("metrics.csv", b""))

    assert main([*arguments, "--trainer.max_steps=30"]) == 0

    assert validated(tmp_path) == [9, 19, 24, 29]
    assert tensorboard_steps(tmp_path, "train/loss") == steps(tmp_path, "train/loss")


@pytest.mark.parametrize(
    ("n_steps", "first", "all_steps"),
    [(25, [9, 19, 24], [9, 19, 24]), (13, [9, 12], [9, 12, 19, 24])],
)
def test_the_last_step_is_validated(
    shards: Path,
    tmp_path: Path,
    trained: Train,
    n_steps: int,
    first: list[int],
    all_steps: list[int],
) -> None:
    """It is validated once, also if a finished run is continued or a longer run goes on."""
    whole = trained(*SHORT, f"--trainer.max_steps={n_steps}")
    run_dir = shutil.copytree(whole, tmp_path / "run")
    assert validated(run_dir) == first

    assert main(fit_arguments(shards, run_dir, *SHORT, "--ckpt_path=last")) == 0

    assert validated(run_dir) == all_steps
    assert steps(run_dir, "train/loss") == [*range(25)]


def test_settings_are_in_hparams_yaml_and_in_tensorboard(trained: Train) -> None:
    """The tab takes val/loss, its only metric, from the curve."""
    run_dir = trained(*SHORT)

    settings_on_file = hparams_on_file(run_dir)
    shown = hparams_shown(run_dir)
    (metric,) = hparams_of(run_dir, "experiment").experiment.metric_infos

    assert settings_on_file["model"]["architecture"] == "AnGPT"
    assert settings_on_file["model"]["context_length"] == 32
    assert settings_on_file["seed_everything"] == 1
    assert shown["model.optimizer.class_path"].string_value == "anlit.AdamW"
    assert shown["model.d_model"].number_value == 32
    assert shown["trainer.max_steps"].number_value == 25
    assert metric.name.tag == "val/loss"


def hparams_on_file(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "hparams.yaml").read_text())


def hparams_of(run_dir: Path, name: str) -> Any:
    """Return a part of TensorBoard's tab HPARAMS."""
    metadata = EventAccumulator(str(run_dir)).Reload().summary_metadata
    return HParamsPluginData.FromString(metadata[f"_hparams_/{name}"].plugin_data.content)


def hparams_shown(run_dir: Path) -> Any:
    """Return the settings of a run in TensorBoard's tab HPARAMS."""
    return hparams_of(run_dir, "session_start_info").session_start_info.hparams


BY_SIZE = ("--config=model/angpt.yaml", "--trainer.log_every_n_steps=2")


def test_hparams_name_the_data_and_come_from_the_last_launch(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    settings = (*BY_SIZE, "--trainer.max_steps=4")
    run_dir = shutil.copytree(trained(*settings), tmp_path / "run")
    shown = hparams_shown(run_dir)
    data = record_of(run_dir)["data"]
    assert shown["data.corpus"].string_value == data["corpus"]
    assert shown["data.tokenizer_sha256"].string_value == data["tokenizer_sha256"]
    longer = ("--trainer.max_steps=6", "--model.z_loss=0.5", "--ckpt_path=last")

    assert main(fit_arguments(shards, run_dir, *settings, *longer)) == 0

    shown = hparams_shown(run_dir)
    assert shown["trainer.max_steps"].number_value == 6
    assert shown["model.z_loss"].number_value == 0.5
    assert "model.z_loss 0.0 → 0.5" in shown["launch.changed"].string_value


def test_a_rate_by_size_is_on_every_record(trained: Train) -> None:
    """`lr: null` of model/angpt.yaml is 0.016 at a width of 32."""
    run_dir = trained(*BY_SIZE, "--trainer.max_steps=4")

    optimizer = model_settings_of(run_dir)["optimizer"]
    (launch,) = record_of(run_dir)["launches"]
    shown = hparams_shown(run_dir)
    on_file = hparams_on_file(run_dir)
    assert optimizer["init_args"]["lr"] == 0.016
    assert set(launch["peak_rates"].values()) == {0.016}
    assert shown["peak_rate.matrices"].number_value == pytest.approx(0.016)
    assert on_file["peak_rate"]["matrices"] == 0.016


def test_an_initial_value_by_size_is_a_number_in_records_and_checkpoints(trained: Train) -> None:
    """`alpha_init: null` and `s_z_init: null` of model/angpt.yaml, 2 layers, a width of 32."""
    run_dir = trained(*BY_SIZE, "--trainer.max_steps=4")

    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=False)
    shown = hparams_shown(run_dir)
    for settings in (checkpoint["hyper_parameters"], hparams_on_file(run_dir)["model"]):
        assert settings["alpha_init"] == 1 / 4
        assert settings["s_z_init"] == math.sqrt(32)
    assert shown["model.alpha_init"].number_value == 1 / 4


def test_the_line_of_progress_and_metrics_csv_have_the_same_losses_for_a_step(
    shards: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Every logged step has a line, and every validated step. No line has an earlier loss."""
    monkeypatch.setattr("anlit.training.callbacks.progress.SECONDS_BETWEEN_LINES", -1.0)
    flags = (
        "--trainer.max_steps=12",
        "--trainer.val_check_interval=5",
        "--trainer.log_every_n_steps=2",
        "--trainer.enable_progress_bar=true",
    )
    run_dir = tmp_path / "run"

    assert main(fit_arguments(shards, run_dir, *flags)) == 0

    out = capsys.readouterr().out
    first_line, *_ = out.splitlines()
    lines = lines_with(out, "step")
    losses = {
        "loss": dict(logged(run_dir, "train/loss")),
        "val": dict(logged(run_dir, "val/loss")),
    }
    shown_steps = [2, 4, 5, 6, 8, 10, 12]
    assert set(losses["val"]) == {4, 9, 11}
    assert "peak rate 0.001" in first_line
    for step, line in zip(shown_steps, lines, strict=True):
        assert line.startswith(f"step {step}/12 ")
        for name, losses_by_step in losses.items():
            shown = re.findall(rf"{name} (\S+)", line)
            if step - 1 in losses_by_step:
                assert shown == [f"{float(losses_by_step[step - 1]):.3f}"]
            else:
                assert shown == []


class BarLosses(L.Callback):
    """Records the loss that a progress bar reads at the end of each step."""

    def __init__(self) -> None:
        self.shown: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.shown.append(float(trainer.progress_bar_metrics["loss"]))


def test_a_progress_bar_of_lightnings_shows_the_loss_of_its_step() -> None:
    bar = BarLosses()
    losses = Logged("train/loss")
    fit(tiny(AnGPT), 6, callbacks=[bar, losses])
    assert bar.shown == losses.values["train/loss"]


def test_a_log_file_has_steps_of_the_whole_run_also_after_a_resume(
    shards: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("anlit.training.callbacks.progress.SECONDS_BETWEEN_LINES", math.inf)
    run_dir = tmp_path / "run"
    every_second = ("--trainer.enable_progress_bar=true", "--trainer.val_check_interval=2")
    for n_steps, beginnings, shown in (
        (4, [f"{run_dir} has no checkpoint", "AnGPT, "], ["step 2/4", "step 4/4"]),
        (6, ["continuing at step 4"], ["step 6/6"]),
    ):
        settings = (*every_second, "--ckpt_path=last", f"--trainer.max_steps={n_steps}")
        assert main(fit_arguments(shards, run_dir, *settings)) == 0

        out = capsys.readouterr().out
        first_lines = out.splitlines()[: len(beginnings)]
        for line, beginning in zip(first_lines, beginnings, strict=True):
            assert beginning in line
        assert f"in {run_dir}" in first_lines[-1]
        for line, step in zip(lines_with(out, "step"), shown, strict=True):
            numbers = r"  [\d.]+k? tokens/s  loss \d\.\d{3}  val \d\.\d{3}"
            assert re.match(step + numbers, line)
        assert not re.search("Epoch|TPU|Tip", out)


class Meetings(L.Callback):
    """Writes the step of each collective call that Python waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.steps: list[int] = []
        for name in ("barrier", "broadcast", "all_reduce", "all_gather"):
            original = getattr(distributed, name)
            setattr(distributed, name, partial(self._noted, original))

    def _noted(self, call: Any, *arguments: Any, **settings: Any) -> Any:
        if not settings.get("async_op"):
            self.steps.append(self.step)
        return call(*arguments, **settings)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.steps))


@pytest.mark.parametrize("strategy", [ranks.DDP, ranks.FSDP], ids=["ddp", "fsdp"])
def test_ranks_wait_for_each_other_only_where_they_log(
    shards: Path, tmp_path: Path, strategy: list[str]
) -> None:
    """A meeting beyond the gradients' would wait for the device."""
    settings = (
        "--trainer.callbacks+=tests.integration.test_run_logs.Meetings",
        f"--trainer.callbacks.folder={tmp_path}",
        "--trainer.max_steps=12",
        "--trainer.log_every_n_steps=5",
        "--checkpoint_every_n_steps=1000",
        "--trainer.enable_progress_bar=true",
    )
    arguments = fit_arguments(shards, tmp_path / "run", *strategy, *settings)

    assert ranks.run_ranks(arguments, 2) == [0, 0]

    for rank in range(2):
        meetings = set(json.loads((tmp_path / f"{rank}.json").read_text()))
        assert 5 in meetings, "the loss is that of all ranks there"
        assert meetings <= {0, 5, 10, 12}


def test_a_run_without_loggers_has_its_steps_in_the_list_of_runs(
    shards: Path, tmp_path: Path, capsys
) -> None:
    flags = ("--trainer.logger=false", "--trainer.max_steps=3")
    assert main(fit_arguments(shards, tmp_path / "run", *flags)) == 0
    capsys.readouterr()

    assert main(["runs", str(tmp_path / "run"), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["step"] == 3


@pytest.mark.parametrize(
    ("trainer", "last"),
    [
        ({"max_steps": 3, "accumulate_grad_batches": 4}, "step 3/3"),  # micro-batches are no steps
        ({"max_epochs": 2}, "step 6/6"),  # without max_steps the epochs say how many
    ],
)
def test_lines_of_progress_count_steps_of_the_run(
    trainer: dict[str, int], last: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("anlit.training.callbacks.progress.SECONDS_BETWEEN_LINES", -1.0)
    settings = {
        "enable_progress_bar": True,
        "devices": 1,
        "callbacks": [RunProgress()],
        "log_every_n_steps": 1,
        **trainer,
    }

    quiet_trainer(**settings).fit(tiny(AnGPT), batches(12, 16, batch_size=4))

    lines = lines_with(capsys.readouterr().out, "step")
    assert re.match(rf"{last} .*loss \d\.\d{{3}} ", lines[-1])


@pytest.mark.parametrize("log_every_n_steps", [1, 2, 10])
def test_a_short_run_without_validation_ends_with_its_loss(capsys, log_every_n_steps: int) -> None:
    settings = {"enable_progress_bar": True, "devices": 1, "callbacks": [RunProgress()]}
    trainer = quiet_trainer(max_steps=3, log_every_n_steps=log_every_n_steps, **settings)

    trainer.fit(tiny(AnGPT), batches(3, 16, batch_size=4))

    (line,) = lines_with(capsys.readouterr().out, "step")
    loss = float(trainer.callback_metrics["loss"])
    assert line.startswith("step 3/3  ")
    assert f"  loss {loss:.3f}  " in line
