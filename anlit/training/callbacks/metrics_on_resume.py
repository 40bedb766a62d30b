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
        self._missing: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training and is_logged(trainer, trainer.global_step):
            checkpoint[KEY] = {"epoch": trainer.current_epoch, **logged_metrics(trainer)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._missing = checkpoint.get(KEY)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.global_step
        for logger in trainer.loggers if trainer.is_global_zero else []:
            if isinstance(logger, CSVLogger):
                rows = logger.rewrite(before=step)
                if any(row["step"] == str(step - 1) and row.get("train/loss") for row in rows):
                    self._missing = None
            elif isinstance(logger, TensorBoardLogger) and step:
                from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only who logs to it needs it

                writer = logger.experiment.file_writer  # as SummaryWriter does for its purge_step
                writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        for logger in trainer.loggers if trainer.is_global_zero and self._missing else []:
            logger.log_metrics(self._missing or {}, step - 1)
            logger.save()
        self._missing = None
