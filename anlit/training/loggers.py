"""metrics.csv and TensorBoard's curves that have each step once, also after a resume; TensorBoard's HPARAMS tab."""

import csv
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from anlit.io.read import parse_cell, read_rows
from anlit.io.write import replacing
from anlit.runs.folders import METRICS
from anlit.runs.groups import flatten
from anlit.training.lightning_internals import is_logged, logged_metrics

HPARAMS = ".hparams"
"""How the name of the events file with a launch's settings ends."""


class MetricsCSV(Logger):
    """Writes `metrics.csv` into the run folder, row by row, appending after a resume, and `hparams.yaml`.

    `--trainer.logger CSVLogger` is Lightning's.
    """

    name = version = ""

    def __init__(self, run_dir: str) -> None:
        super().__init__()
        self.path = Path(run_dir) / METRICS
        self._columns: list[str] = []
        self.unwritten: list[dict[str, Any]] = []
        """Rows that the file lacks because the disk is full; a checkpoint keeps them."""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(self.path.with_name("hparams.yaml"), params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.unwritten.append({"step": step, **convert_tensors_to_scalars(metrics)})
        try:
            self._write_rows()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _write_rows(self) -> None:
        """Append the rows that the file lacks, or leave it as it was."""
        columns = set().union(*self.unwritten)
        if not columns <= {*self._columns}:
            self.rewrite(more_columns=columns)
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(self.unwritten)
        except OSError:
            os.truncate(self.path, size)
            raise
        self.unwritten = []

    def rewrite(
        self, before: float = math.inf, more_columns: Iterable[str] = ()
    ) -> list[dict[str, str]]:
        """Write the rows of steps (from 0) below `before` anew, so that a kill loses nothing; returns them."""
        rows = read_rows(self.path) if self.path.is_file() else []
        self._columns = sorted({*more_columns, *(rows[0] if rows else [])})
        rows = [row for row in rows if parse_cell(row, "step", self.path) < before]
        if self._columns:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial, partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
        return rows


def log_settings(logger: Logger, settings: dict[str, Any]) -> None:
    """Write a launch's settings to a logger; only those of the last launch stay.

    TensorBoard's HPARAMS tab takes val/loss from the curve, which Lightning's own call would add a value to. The tab
    shows the first settings that it finds, so they have a file of their own, which replaces the earlier launch's.
    """
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(settings)
        return
    from torch.utils.tensorboard.summary import hparams  # only who logs to TensorBoard needs it
    from torch.utils.tensorboard.writer import FileWriter

    logger.hparams.update(settings)
    for earlier in Path(logger.log_dir).glob(f"events.out.tfevents.*{HPARAMS}"):
        earlier.unlink()
    writer = FileWriter(logger.log_dir, filename_suffix=HPARAMS)
    for summary in hparams(dict(flatten(settings)), {"val/loss": 0.0}):
        writer.add_summary(summary)
    writer.close()


class MetricsOnResume(L.Callback):
    """Cuts metrics.csv and TensorBoard's curves back to the step at which a run starts or continues.

    Rows of later steps come from a run that was killed, and will be logged again. Lightning writes the row of the
    checkpoint's step after the checkpoint, so it may be missing, and the checkpoint contains it.
    Callbacks that monitor a value, such as the last val/loss, find it there again.
    """

    _missing: dict[str, Any] | None = None
    _unwritten: Sequence[dict[str, Any]] = ()
    _monitored: dict[str, Any] | None = None

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
            if isinstance(logger, MetricsCSV) and logger.unwritten:
                checkpoint["metrics_unwritten"] = logger.unwritten

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._missing = checkpoint.get("metrics_under_way")
        self._unwritten = checkpoint.get("metrics_unwritten", [])
        self._monitored = checkpoint.get("monitored")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics.update(self._monitored or {})
        self._monitored = None
        self._restore_rows(trainer)

    @rank_zero_only
    def _restore_rows(self, trainer: L.Trainer) -> None:
        step, missing, self._missing = trainer.global_step, self._missing, None
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                rows = logger.rewrite(before=step)
                for row in self._unwritten:
                    metrics = {name: value for name, value in row.items() if name != "step"}
                    logger.log_metrics(metrics, row["step"])
                self._unwritten = ()
                if any(row["step"] == str(step - 1) and row.get("train/loss") for row in rows):
                    missing = None
            elif isinstance(logger, TensorBoardLogger) and step:
                from tensorboard.compat.proto.event_pb2 import (
                    Event,
                    SessionLog,
                )  # only who logs to it needs it

                writer = logger.experiment.file_writer  # as SummaryWriter does for its purge_step
                writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        for logger in trainer.loggers if missing else []:
            logger.log_metrics(missing or {}, step - 1)
            logger.save()
