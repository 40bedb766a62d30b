"""The run's settings in TensorBoard, so that its HParams tab compares runs by them and their final validation loss."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

METRIC = "val/loss"
SCALARS = (bool, int, float, str)


class HyperParameters(L.Callback):
    """Writes the settings of model, data and Trainer beside the curves, with `val/loss` as the metric.

    Lightning's own `log_hyperparams` would add a point of that curve at step 0; here the tab reads the training's own.
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
    """Short dotted names → values: `lr` of the optimizer is `model.optimizer.lr`; what is not set is left out."""
    data = getattr(trainer, "datamodule", None)
    found = {"architecture": type(pl_module).__name__, **_flat(dict(pl_module.hparams), "model.")}
    if data is not None:
        own = {name: getattr(data, name) for name in ("batch_size", "seed") if hasattr(data, name)}
        found |= {"data": type(data).__name__, **_flat(own, "data.")}
    if "PL_GLOBAL_SEED" in os.environ:  # where seed_everything leaves it
        found["seed"] = int(os.environ["PL_GLOBAL_SEED"])
    found |= {"trainer.max_steps": trainer.max_steps, "trainer.precision": str(trainer.precision),
              "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}  # fmt: skip
    return found


def _flat(value: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Nested settings on one level: a class stands under its part's name, its arguments below it."""
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
