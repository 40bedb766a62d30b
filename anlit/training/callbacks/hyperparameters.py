"""The run's settings for TensorBoard's HParams tab, which compares runs by settings and final validation loss."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from anlit.runs.groups import flatten
from anlit.settings import as_plain

METRIC = "val/loss"


class HyperParameters(L.Callback):
    """Writes the settings of model, data and Trainer to TensorBoard, with `val/loss` as the metric.

    Lightning's `log_hyperparams` would add a point to that curve at step 0. Here the tab reads the points of training.
    """

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from torch.utils.tensorboard.summary import hparams  # it takes half a second, which --help does not wait for

        begin, *session = hparams(settings_of(trainer, pl_module), {METRIC: 0.0})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for summary in (begin, *session):
                    logger.experiment.file_writer.add_summary(summary)


def settings_of(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
    """Dotted names → values: `lr` of the optimizer is `model.optimizer.init_args.lr`. None is left out."""
    data = getattr(trainer, "datamodule", None)
    of_trainer = {name: getattr(trainer, name) for name in ("max_steps", "precision", "accumulate_grad_batches")}
    found = {
        "architecture": type(pl_module).__name__,
        "seed": os.environ.get("PL_GLOBAL_SEED"),  # set by seed_everything
        "model": as_plain(dict(pl_module.hparams)),
        "data": {name: getattr(data, name, None) for name in ("batch_size", "seed")} | {"kind": type(data).__name__},
        "trainer": of_trainer,
    }
    return dict(flatten(found))
