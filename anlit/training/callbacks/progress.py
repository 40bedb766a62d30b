"""The first line of a run, and its progress: every 10 s, after each validation and at the end."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only

from anlit.config.batch_ramp import Ramp, ramp_of
from anlit.reporting.text import echo, short_number
from anlit.training.lightning_internals import is_logged, validation_follows

SECONDS_BETWEEN_LINES = 10.0
"""The result of a validation is always printed."""


class RunDescription(L.Callback):
    """Prints model, devices, precision, rates and folder of a run that starts, in one line."""

    changes_learning = False

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        devices = pl_module.device.type
        if trainer.world_size > 1:
            devices = f"{trainer.world_size} × {devices}"
        facts = [
            type(pl_module).__name__,
            f"{pl_module.model.n_parameters():,} parameters",
            devices,
            str(trainer.precision),
            f"peak rate {format_rates(pl_module.peak_rates())}",
            f"in {trainer.default_root_dir}",
        ]
        if trainer.global_step:
            facts.append(f"continuing at step {trainer.global_step}")
        echo(", ".join(facts))


class RunProgress(ProgressBar):
    """Prints `step 120/1950  12.3k tokens/s  loss 3.214  val 3.301  0:04:12 left`.

    A line comes at a logged step. The host waits for the device there anyway. The last step has a
    line in any case. This class counts the steps of the run. Lightning's bars count the batches of
    an epoch. `enable_progress_bar: false` turns it off.
    """

    changes_learning = False
    """Runs with and without this callback belong to one configuration."""

    def __init__(self) -> None:
        super().__init__()
        self._is_enabled = True
        self._first_step = 0
        self._step = 0
        self._printed_step = 0
        """The step of the last line."""
        self._total = 0
        """The run's steps; 0 if neither max_steps nor the data tell them."""
        self._ramp = Ramp({0: 1})
        self._started_at = 0.0
        """When the first step began, in seconds of `time.monotonic`.

        Each validation moves it on by its duration, so that the speed counts steps only.
        """
        self._paused_at = 0.0
        """The start of the last validation."""
        self._printed_at = time.monotonic()
        """The time of the last line."""
        self._is_logged = False
        """Whether the last step was logged, so that its loss is known."""

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line; Lightning's `trainer.print` calls this."""
        if self._is_enabled:
            echo(" ".join(map(str, args)))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        self._total = int(total) if 0 < total < float("inf") else 0
        self._ramp = ramp_of(trainer)
        self._first_step = trainer.global_step
        self._step = trainer.global_step
        self._printed_step = trainer.global_step
        self._started_at = time.monotonic()
        self._printed_at = self._started_at

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # several micro-batches make one step
            return
        self._step = trainer.global_step
        self._is_logged = is_logged(trainer, self._step)
        # If validation follows, the line comes after it. If validations come by the clock, ranks
        # agree whether one follows. So all of them ask, whether or not their line is due.
        if self._is_logged and not validation_follows(trainer) and self._is_due():
            self._print_step(_metrics_of_step(trainer, has_loss=True, has_validation=False))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused_at = time.monotonic()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due():
            self._print_line(f"validation {batch_idx + 1}/{trainer.num_val_batches[0]:.0f}")

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due():
            self._print_line(f"test {batch_idx + 1}/{trainer.num_test_batches[0]:.0f}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started_at += time.monotonic() - self._paused_at
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._print_step(_metrics_of_step(trainer, self._is_logged, has_validation=True))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_single_cpu = pl_module.device.type == "cpu" and trainer.world_size == 1
        # Lightning may reduce metrics over ranks here. So all ranks ask, whatever they printed.
        has_loss = self._is_logged or is_single_cpu
        metrics = _metrics_of_step(trainer, has_loss, has_validation=False)
        if self._step > self._printed_step:
            self._print_step(metrics)

    def _is_due(self) -> bool:
        return time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES

    def _print_step(self, metrics: dict[str, Any]) -> None:
        count = f"step {self._step}/{self._total or '?'}"
        texts = [count, format_metrics(metrics), self._remaining_time()]
        self._printed_step = self._step
        self._print_line("  ".join(filter(None, texts)))

    def _print_line(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self.print(line)

    def _remaining_time(self) -> str:
        """The remaining time at the mean speed of this process's micro-batches."""
        n_batches = self._ramp.total(self._step) - self._ramp.total(self._first_step)
        if not self._total or not n_batches:
            return ""
        seconds_per_batch = (time.monotonic() - self._started_at) / n_batches
        n_left = self._ramp.total(self._total) - self._ramp.total(self._step)
        return f"{timedelta(seconds=round(seconds_per_batch * n_left))} left"


def _metrics_of_step(trainer: L.Trainer, has_loss: bool, has_validation: bool) -> dict[str, Any]:
    """The metrics of a line, without losses that are not of its step.

    Without `has_loss` the loss is of an earlier step, or of one rank. Without `has_validation` the
    validation loss is of an earlier step.
    """
    metrics = dict(trainer.progress_bar_metrics)
    if not has_loss:
        metrics.pop("loss", None)
    if not has_validation:
        metrics.pop("val/loss", None)
    return metrics


def format_metrics(metrics: dict[str, Any]) -> str:
    """Speed, training loss and validation loss from Lightning's metrics, if present."""
    texts = []
    if "train/tokens_per_second" in metrics:
        texts.append(f"{short_number(float(metrics['train/tokens_per_second']))} tokens/s")
    if "loss" in metrics:
        texts.append(f"loss {float(metrics['loss']):.3f}")
    if "val/loss" in metrics:
        texts.append(f"val {float(metrics['val/loss']):.3f}")
    return "  ".join(texts)


def format_rates(rates: dict[str, float]) -> str:
    """The learning rate of each parameter group, or the common rate."""
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):.3g}"
    return " ".join(f"{name} {rate:.3g}" for name, rate in rates.items())
