"""The progress of a run in a line.

A terminal shows it anew at each step. A log file gets it every 10 s.
"""

import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TextColumn

from anlit.config.batch_ramp import Ramp, ramp_of
from anlit.reporting import table
from anlit.reporting.table import SafeConsole
from anlit.reporting.text import echo, short_number
from anlit.training.lightning_internals import is_logged, validation_follows

SECONDS_BETWEEN_LINES = 10.0
"""In a log file. The result of a validation is always printed."""


class RunProgress(ProgressBar):
    """Shows `step 120/1950 ━━━━ 12.3k tokens/s  loss 3.214  val 3.301  0:04:12 left`.

    The numbers change at logged steps only. The host waits for the device there anyway. This bar
    counts the steps of the run. Lightning's bars count the batches of an epoch.
    `enable_progress_bar: false` turns it off.

    Args:
        console: The output; standard output by default.
    """

    changes_learning = False
    """Runs with and without this callback belong to one configuration."""

    def __init__(self, console: SafeConsole | None = None) -> None:
        super().__init__()
        self._console = console or table.console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(10),
            TextColumn("{task.fields[status]}"),
        )
        self._line = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._line.add_task("", status="")
        self._is_enabled = True
        self._first_step = 0
        self._step = 0
        self._total = 0
        """The run's steps; 0 if neither max_steps nor the data tell them."""
        self._ramp = Ramp({0: 1})
        self._started_at = 0.0
        """When the first step began, in seconds of `time.monotonic`.

        Each validation moves it on by its duration, so that the speed counts steps only.
        """
        self._paused_at = 0.0
        """The start of the last validation."""
        self._printed_at = 0.0
        """The time of the last line in a log file."""
        self._numbers = ""
        """Speed and losses, as `format_metrics` gives them."""
        self._is_logged = False
        """Whether the last step was logged, so that its loss is known."""

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the line; Lightning's `trainer.print` calls this."""
        if self._is_enabled:
            self._console.print(*args, soft_wrap=True, **kwargs)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        self._total = int(total) if 0 < total < float("inf") else 0
        self._ramp = ramp_of(trainer)
        self._first_step = trainer.global_step
        self._step = trainer.global_step
        self._started_at = time.monotonic()
        self._printed_at = self._started_at
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
        if self._step:
            facts.append(f"continuing at step {self._step}")
        self.print(", ".join(facts))
        self._show("")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # several micro-batches make one step
            return
        self._step = trainer.global_step
        self._is_logged = is_logged(trainer, self._step)
        if self._is_logged:
            self._numbers = format_metrics(trainer.progress_bar_metrics)
        is_due = time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES
        # If validation follows, the line comes after it.
        as_line = is_due and self._is_logged and not validation_follows(trainer)
        self._show(self._status, as_line)

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
        self._draw_evaluation(trainer, "validation", batch_idx + 1, trainer.num_val_batches[0])

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._draw_evaluation(trainer, "test", batch_idx + 1, trainer.num_test_batches[0])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started_at += time.monotonic() - self._paused_at
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = dict(trainer.progress_bar_metrics)
            if not self._is_logged:  # the loss is of an earlier step, or of one rank
                metrics.pop("loss", None)
            self._numbers = format_metrics(metrics)
            self._show(self._status, as_line=True)

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._line.live.is_started:
            self._line.stop()

    def on_exception(self, *_: Any) -> None:
        self.teardown()

    def _draw_evaluation(self, trainer: L.Trainer, name: str, n_batches: int, total: float) -> None:
        """Show `validation 3/10`: as the status of a fit, or as the description."""
        count = f"{name} {n_batches}/{total:.0f}"
        if trainer.state.fn == "fit":
            self._show(count)
        else:
            self._draw_in_terminal(count, n_batches, total)

    def _show(self, status: str, as_line: bool = False) -> None:
        """Redraw the line of a terminal; without a terminal print it if `as_line`."""
        count = f"step {self._step}/{self._total or '?'}"
        self._draw_in_terminal(count, self._step, self._total, status)
        if as_line and self._is_enabled and not self._console.is_terminal:
            self._printed_at = time.monotonic()
            echo("  ".join(filter(None, [count, status])))

    def _draw_in_terminal(
        self, description: str, completed: int, total: float, status: str = ""
    ) -> None:
        """Redraw the line of a terminal; a log file gets nothing."""
        if self._is_enabled and self._console.is_terminal:
            self._line.start()
            self._line.update(
                self._task,
                description=description,
                completed=completed,
                total=total or None,
                status=status,
            )

    @property
    def _status(self) -> str:
        """The numbers, and the remaining time at the mean speed of this process's micro-batches."""
        remaining_time = ""
        n_batches = self._ramp.total(self._step) - self._ramp.total(self._first_step)
        if self._total and n_batches:
            seconds_per_batch = (time.monotonic() - self._started_at) / n_batches
            n_left = self._ramp.total(self._total) - self._ramp.total(self._step)
            seconds = seconds_per_batch * n_left
            remaining_time = f"{timedelta(seconds=round(seconds))} left"
        return "  ".join(filter(None, [self._numbers, remaining_time]))


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
