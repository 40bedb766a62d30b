"""metrics.csv, TensorBoard's curves and its HPARAMS tab: each step once, also after a resume."""

import csv
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from anlit.io.metrics_csv import Row, parse_cell, read_rows
from anlit.io.write import appending, replacing
from anlit.runs.folders import METRICS
from anlit.runs.groups import flatten
from anlit.training.lightning_internals import is_logged, logged_metrics

HPARAMS_FILE = "hparams.yaml"
"""The file with the settings of the last launch, in the run folder."""
HPARAMS_SUFFIX = ".hparams"
"""The end of the name of TensorBoard's file with a launch's settings."""
WANDB_RUN_ID = "wandb-run-id"
"""The file with the id of the run at Weights & Biases, in the run folder."""


class MetricsCSV(Logger):
    """Writes `metrics.csv` and `hparams.yaml` into the run folder.

    Rows are written one by one, and appended after a resume. `--trainer.logger CSVLogger` takes
    Lightning's logger.
    """

    name = version = ""

    def __init__(self, run_dir: str) -> None:
        super().__init__()
        self.path = Path(run_dir) / METRICS
        self._columns: list[str] = []
        self.unwritten: list[dict[str, Any]] = []
        """Rows that are not in the file because the disk is full. A checkpoint keeps them."""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(self.path.with_name(HPARAMS_FILE), params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.unwritten.append({"step": step, **convert_tensors_to_scalars(metrics)})
        try:
            self._write_rows()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @rank_zero_only
    def flush_to_disk(self) -> None:
        """Wait until a power cut would keep the rows, as the checkpoint that is written next.

        Some file systems cannot promise this. An error of the disk ends the checkpoint too.
        """
        with suppress(OSError), self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _write_rows(self) -> None:
        """Append the unwritten rows, or leave the file unchanged."""
        columns = set().union(*self.unwritten)
        if not columns.issubset(self._columns):
            self.rewrite(more_columns=columns)
        with appending(self.path) as file:
            csv.DictWriter(file, self._columns).writerows(self.unwritten)
        self.unwritten = []

    def rewrite(
        self,
        end_step: float = math.inf,
        more_columns: Iterable[str] = (),
        first_returned: float = math.inf,
    ) -> list[Row]:
        """Write the rows of steps (from 0) below `end_step` anew. Columns may be added.

        Returns the written rows from step `first_returned` on. All rows of a long run would fill
        the memory. A kill at any moment loses no row.
        """
        returned = []
        columns = self._read_columns().union(more_columns)
        self._columns = sorted(columns)
        if self._columns:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (
                replacing(self.path) as partial,
                partial.open("w", encoding="utf-8", newline="") as file,
            ):
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                for row in self._read_rows():
                    step = parse_cell(row, "step", self.path)
                    if step < end_step:
                        writer.writerow(row)
                        if step >= first_returned:
                            returned.append(row)
        return returned

    def _read_columns(self) -> set[str]:
        """The columns of the file; empty without a row."""
        return set(next(self._read_rows(), ()))

    def _read_rows(self) -> Iterator[Row]:
        return read_rows(self.path) if self.path.is_file() else iter(())


def log_settings(logger: Logger, settings: dict[str, Any]) -> None:
    """Write a launch's settings to a logger. They replace the settings of earlier launches.

    TensorBoard's HPARAMS tab takes val/loss from the curve. Lightning's call would add a value to
    the curve. The tab shows the first settings that it finds. So they are in a separate file. It
    replaces the earlier launch's file.
    """
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(settings)
        return
    # tensorboard is an optional dependency.
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.writer import FileWriter

    logger.hparams.update(settings)
    for earlier_file in Path(logger.log_dir).glob(f"events.out.tfevents.*{HPARAMS_SUFFIX}"):
        earlier_file.unlink()
    writer = FileWriter(logger.log_dir, filename_suffix=HPARAMS_SUFFIX)
    for summary in hparams(dict(flatten(settings)), {"val/loss": 0.0}):
        writer.add_summary(summary)
    writer.close()


class MetricsOnResume(L.Callback):
    """Cuts metrics.csv and TensorBoard's curves at the step where a run starts or continues.

    Rows of later steps come from a killed run, and will be logged again. Lightning writes the row
    of the checkpoint's step after the checkpoint. So the row may be missing, and the checkpoint
    contains it. Callbacks that monitor a value, such as the last val/loss, find it in
    `trainer.callback_metrics` again.
    """

    _last_metrics: dict[str, Any] | None = None
    """What the checkpoint's step has logged; None if it was no logging step."""
    _unwritten: Sequence[dict[str, Any]] = ()
    """Rows for which the disk had no space."""
    _monitored: dict[str, Any] | None = None
    """The values that callbacks monitor."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["monitored"] = {**trainer.callback_metrics}
        if trainer.training and is_logged(trainer, trainer.global_step):
            checkpoint["metrics_under_way"] = {
                "epoch": trainer.current_epoch,
                **logged_metrics(trainer),
            }
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.flush_to_disk()
                if logger.unwritten:
                    checkpoint["metrics_unwritten"] = logger.unwritten

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._last_metrics = checkpoint.get("metrics_under_way")
        self._unwritten = checkpoint.get("metrics_unwritten", [])
        self._monitored = checkpoint.get("monitored")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics.update(self._monitored or {})
        self._monitored = None
        self._restore_rows(trainer)

    @rank_zero_only
    def _restore_rows(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        last_metrics, self._last_metrics = self._last_metrics, None
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                if self._restore_csv(logger, step):
                    last_metrics = None
            elif isinstance(logger, TensorBoardLogger):
                _hide_later_events(logger, step)
        if last_metrics:
            for logger in trainer.loggers:
                logger.log_metrics(last_metrics, step - 1)
                logger.save()

    def _restore_csv(self, logger: MetricsCSV, step: int) -> bool:
        """Cut metrics.csv before `step` and add the unwritten rows that it lacks.

        It has them if the run was continued before, from another checkpoint of the same time.
        Returns whether the file had the last step's row already.
        """
        steps = [row["step"] for row in self._unwritten]
        rows = logger.rewrite(end_step=step, first_returned=min([step - 1, *steps]))
        for row in self._unwritten:
            if not _has_row(rows, row):
                metrics = dict(row)
                logger.log_metrics(metrics, metrics.pop("step"))
        self._unwritten = ()
        losses = [row.get("train/loss") for row in rows if row["step"] == str(step - 1)]
        return any(losses)


def _has_row(rows: Iterable[Row], logged: dict[str, Any]) -> bool:
    """Whether a file's rows include a logged row, with the same text in each cell."""
    texts = {name: str(value) for name, value in logged.items() if value is not None}
    for row in rows:
        cells = {name: cell for name, cell in row.items() if cell}
        if cells == texts:
            return True
    return False


def _hide_later_events(logger: TensorBoardLogger, step: int) -> None:
    """Let TensorBoard show no event from `step` on, as SummaryWriter does for its purge_step."""
    # tensorboard is an optional dependency.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    session_log = SessionLog(status=SessionLog.START)
    logger.experiment.file_writer.add_event(Event(step=step, session_log=session_log))
