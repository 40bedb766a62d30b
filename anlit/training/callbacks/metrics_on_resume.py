"""Makes a resumed run log each step once: removes rows after the checkpoint, and adds one that is missing."""

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from anlit.lightning_internals import is_logged, logged_metrics
from anlit.training.loggers import CSVLogger

KEY = "metrics_under_way"


class MetricsOnResume(L.Callback):
    """Cuts metrics.csv and TensorBoard's curves back to the step at which a run starts or continues.

    Rows of later steps come from a run that was killed, and will be logged again. The row of the checkpoint's step may
    be missing, because Lightning writes it after the checkpoint of that step. So the checkpoint contains it.
    """

    def __init__(self) -> None:
        self._saved_row: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training and is_logged(trainer, trainer.global_step):
            checkpoint[KEY] = {"epoch": trainer.current_epoch, **logged_metrics(trainer)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved_row = checkpoint.get(KEY)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        step, (missing, self._saved_row) = trainer.global_step, (self._saved_row, None)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                kept = logger.drop_from(step)
                if any(row["step"] == str(step - 1) and row.get("train/loss") for row in kept):
                    missing = None
            elif isinstance(logger, TensorBoardLogger) and step:
                from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only who logs to it needs it

                writer = logger.experiment.file_writer  # as SummaryWriter does for its purge_step
                writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        if missing:
            for logger in trainer.loggers:
                logger.log_metrics(missing, step - 1)
                logger.save()
