"""The logs of a run: validation at the end, settings, lines of progress, meetings of ranks."""

import io
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import distributed

from anlit import AnGPT
from anlit.cli import main
from anlit.training.callbacks.progress import RunProgress
from tests.data.modules import quiet_trainer
from tests.integration import ranks
from tests.integration.conftest import Train, fit_arguments, run
from tests.integration.run_files import logged
from tests.nn.models.tiny import Logged, batches, fit, tiny

SHORT = ("--trainer.max_steps=25", "--trainer.val_check_interval=10")


def validated(run_dir: Path) -> list[int]:
    """Return the steps in metrics.csv with a validation loss. TensorBoard has the same."""
    steps = [step for step, _ in logged(run_dir, "val/loss")]
    assert [
        event.step for event in EventAccumulator(str(run_dir)).Reload().Scalars("val/loss")
    ] == steps
    return steps


@pytest.mark.parametrize(("first", "steps"), [(25, [9, 19, 24]), (13, [9, 12, 19, 24])])
def test_the_last_step_is_validated(
    shards: Path, tmp_path: Path, trained: Train, first: int, steps: list[int]
) -> None:
    """Once, also if a finished run is continued. A longer run goes on between two intervals."""
    run_dir = shutil.copytree(trained(*SHORT, f"--trainer.max_steps={first}"), tmp_path / "run")
    assert validated(run_dir) == [step for step in steps if step < first]
    assert run(fit_arguments(shards, run_dir, *SHORT, "--ckpt_path=last")) == 0
    assert validated(run_dir) == steps
    assert [step for step, _ in logged(run_dir, "train/loss")] == [*range(25)]


def test_settings_are_in_hparams_yaml_and_in_tensorboard(trained: Train) -> None:
    """The tab takes val/loss, its only metric, from the curve."""
    run_dir = trained(*SHORT)
    settings_on_file = yaml.safe_load((run_dir / "hparams.yaml").read_text())
    assert (
        settings_on_file["model"]["architecture"],
        settings_on_file["model"]["context_length"],
        settings_on_file["seed_everything"],
    ) == ("AnGPT", 32, 1)
    contents = EventAccumulator(str(run_dir)).Reload().summary_metadata
    session, experiment = (
        HParamsPluginData.FromString(contents[f"_hparams_/{name}"].plugin_data.content)
        for name in ("session_start_info", "experiment")
    )
    shown = session.session_start_info.hparams
    assert shown["model.optimizer.class_path"].string_value == "anlit.AdamW"
    assert (shown["model.d_model"].number_value, shown["trainer.max_steps"].number_value) == (
        32,
        25,
    )
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == ["val/loss"]


def hparams_shown(run_dir: Path) -> Any:
    """Return the content of a run in TensorBoard's tab HPARAMS."""
    contents = EventAccumulator(str(run_dir)).Reload().summary_metadata
    content = contents["_hparams_/session_start_info"].plugin_data.content
    return HParamsPluginData.FromString(content).session_start_info.hparams


BY_SIZE = ("--config=model/angpt.yaml", "--trainer.log_every_n_steps=2")


def test_hparams_name_the_data_and_come_from_the_last_launch(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    settings = (*BY_SIZE, "--trainer.max_steps=4")
    run_dir = shutil.copytree(trained(*settings), tmp_path / "run")
    shown = hparams_shown(run_dir)
    record = json.loads((run_dir / "run.json").read_text())
    assert shown["data.corpus"].string_value == record["data"]["corpus"]
    assert shown["data.tokenizer_sha256"].string_value == record["data"]["tokenizer_sha256"]
    longer = ("--trainer.max_steps=6", "--model.z_loss=0.5", "--ckpt_path=last")
    assert run(fit_arguments(shards, run_dir, *settings, *longer)) == 0
    shown = hparams_shown(run_dir)
    assert shown["trainer.max_steps"].number_value == 6
    assert shown["model.z_loss"].number_value == 0.5
    assert "model.z_loss 0.0 → 0.5" in shown["launch.changed"].string_value


def test_a_rate_by_size_is_on_every_record(trained: Train) -> None:
    """`lr: null` of model/angpt.yaml is 0.016 at a width of 32."""
    run_dir = trained(*BY_SIZE, "--trainer.max_steps=4")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.016
    (launch,) = json.loads((run_dir / "run.json").read_text())["launches"]
    assert set(launch["peak_rates"].values()) == {0.016}
    assert hparams_shown(run_dir)["peak_rate.matrices"].number_value == pytest.approx(0.016)
    settings_on_file = yaml.safe_load((run_dir / "hparams.yaml").read_text())
    assert settings_on_file["peak_rate"]["matrices"] == 0.016


def test_the_line_of_progress_and_metrics_csv_have_one_loss_for_a_step(
    shards: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Every logged step has a line, and every validated step."""
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
    assert "peak rate 0.001" in out.splitlines()[0]
    lines = [line for line in out.splitlines() if line.startswith("step")]
    steps = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert steps == [2, 4, 5, 6, 8, 10, 12]
    losses = dict(logged(run_dir, "train/loss"))
    for step, line in zip(steps, lines, strict=True):
        loss = losses.get(step - 1)
        shown = re.search(r"loss (\S+)", line)
        assert (shown and shown[1]) == (loss and f"{float(loss):.3f}"), line


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
    shards: Path, tmp_path: Path, capsys
) -> None:
    settings = (
        "--trainer.enable_progress_bar=true",
        "--trainer.val_check_interval=2",
        "--ckpt_path=last",
    )
    for n_steps, head, shown in (
        (4, ("AnGPT, ", f"in {tmp_path / 'run'}"), ["step 2/4", "step 4/4"]),
        (6, ("continuing at step 4",), ["step 6/6"]),
    ):
        assert (
            main(
                fit_arguments(shards, tmp_path / "run", *settings, f"--trainer.max_steps={n_steps}")
            )
            == 0
        )
        first, *lines = capsys.readouterr().out.splitlines()
        assert all(text in first for text in head)
        assert [line.split("  ")[0] for line in lines if line.startswith("step")] == shown
        numbers = re.compile(r"step .*  [\d.]+k? tokens/s  loss \d\.\d{3}  val \d\.\d{3}")
        assert all(numbers.match(line) for line in lines if line.startswith("step"))
        assert not [line for line in lines if "Epoch" in line or "TPU" in line or "Tip" in line]


class Meetings(L.Callback):
    """Writes the step and name of each collective call that Python waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.seen = folder, 0, list[tuple[int, str]]()
        for name in ("barrier", "broadcast", "all_reduce", "all_gather"):
            setattr(distributed, name, partial(self._noted, name, getattr(distributed, name)))

    def _noted(self, name: str, call: Any, *arguments: Any, **settings: Any) -> Any:
        if not settings.get("async_op"):
            self.seen.append((self.step, name))
        return call(*arguments, **settings)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.seen))


@pytest.mark.parametrize("strategy", [ranks.DDP, ranks.FSDP], ids=["ddp", "fsdp"])
def test_ranks_wait_for_each_other_only_where_they_log(
    shards: Path, tmp_path: Path, strategy: list[str]
) -> None:
    """A meeting beyond the gradients' would wait for the device."""
    noted = [
        "--trainer.callbacks+=tests.integration.test_run_logs.Meetings",
        f"--trainer.callbacks.folder={tmp_path}",
    ]
    steps = [
        "--trainer.max_steps=12",
        "--trainer.log_every_n_steps=5",
        "--checkpoint_every_n_steps=1000",
    ]
    shown = "--trainer.enable_progress_bar=true"
    assert ranks.run_ranks(
        fit_arguments(shards, tmp_path / "run", *strategy, *steps, shown, *noted), 2
    ) == [0, 0]
    for rank in range(2):
        meetings = {step for step, _ in json.loads((tmp_path / f"{rank}.json").read_text())}
        assert 5 in meetings, "the loss is that of all ranks there"
        assert meetings <= {0, 5, 10, 12}


CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.mark.parametrize(
    ("trainer", "last"),
    [
        ({"max_steps": 3, "accumulate_grad_batches": 4}, "step 3/3"),  # micro-batches are no steps
        ({"max_epochs": 2}, "step 6/6"),  # without max_steps the epochs say how many
    ],
)
def test_a_terminal_has_one_line_of_80_columns(trainer: dict[str, int], last: str) -> None:
    written = io.StringIO()
    bar = RunProgress(Console(file=written, force_terminal=True, width=80))
    settings = {
        "enable_progress_bar": True,
        "devices": 1,
        "callbacks": [bar],
        "log_every_n_steps": 1,
        **trainer,
    }
    quiet_trainer(**settings).fit(tiny(AnGPT), batches(12, 16, batch_size=4))
    shown = re.split(r"[\r\n]+", CONTROL.sub("", written.getvalue()))
    lines = [line for line in shown if line.startswith("step")]
    assert re.match(rf"{last} .*loss \d\.\d{{3}} ", lines[-1])
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
def test_a_continued_run_has_one_id_in_wandb(shards: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make extras EXTRAS=wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    for steps, more in ((2, []), (4, ["--ckpt_path=last"])):
        arguments = ("--config=logger/wandb.yaml", f"--trainer.max_steps={steps}", *more)
        assert run(fit_arguments(shards, folder, *arguments)) == 0
    ids = [file.name.rpartition("-")[2] for file in (folder / "wandb").glob("offline-run-*")]
    assert (len(ids), len(set(ids))) == (2, 1)
    assert b"train/loss" in b"".join(
        file.read_bytes() for file in (folder / "wandb").rglob("*.wandb")
    )
    assert len(list(folder.glob("events.out.tfevents.*[!s]"))) == 2  # beside the settings' own
    assert (folder / "metrics.csv").is_file()


def test_without_wandb_the_message_says_how_to_install_it(
    shards: Path, tmp_path: Path, monkeypatch, refusal
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal(*fit_arguments(shards, tmp_path / "run", "--config=logger/wandb.yaml"))
    assert "needs wandb: run `make extras EXTRAS=wandb`" in error
