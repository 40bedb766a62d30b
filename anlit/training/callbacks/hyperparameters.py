"""The run's settings for TensorBoard's HParams tab, which compares runs by settings and final validation loss."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

METRIC = "val/loss"
SCALARS = (bool, int, float, str)


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
    """Short dotted names → values: `lr` of the optimizer is `model.optimizer.lr`. None is left out."""
    data = getattr(trainer, "datamodule", None)
    found = {"architecture": type(pl_module).__name__, **_flat(dict(pl_module.hparams), "model.")}
    if data is not None:
        of_data = {name: getattr(data, name) for name in ("batch_size", "seed") if hasattr(data, name)}
        found |= {"data": type(data).__name__, **_flat(of_data, "data.")}
    if "PL_GLOBAL_SEED" in os.environ:  # set by seed_everything
        found["seed"] = int(os.environ["PL_GLOBAL_SEED"])
    found |= {"trainer.max_steps": trainer.max_steps, "trainer.precision": str(trainer.precision),
              "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}  # fmt: skip
    return found


def _flat(value: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Nested settings as one level: a class has the key of its setting, and its arguments have keys below it."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if key.startswith("_"):
            continue
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and "class_path" in inner:
            found[name] = inner["class_path"].rsplit(".", 1)[-1]
            found |= _flat(inner.get("init_args") or {}, f"{name}.")
        elif isinstance(inner, dict):
            found |= _flat(inner, f"{name}.")
        elif isinstance(inner, SCALARS):
            found[name] = inner
        elif inner is not None:
            found[name] = type(inner).__name__ if hasattr(inner, "__dict__") else str(inner)
    return found
