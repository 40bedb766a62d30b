"""The progress of a run in one line: redrawn in a terminal, printed now and then in a log file."""

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from anlit.lightning_internals import is_logged
from anlit.reporting import table
from anlit.reporting.table import SafeConsole
from anlit.reporting.text import echo, short_number

SECONDS_BETWEEN_LINES = 10.0
"""The interval of lines in a log file. A validation's result is always printed."""


class RunProgress(ProgressBar):
    """Shows `step 120/1950 ━━━━ 12.3k tokens/s  loss 3.214  val 3.301  4:12 left`.

    The numbers change at logged steps only, where the host waits for the device anyway. Lightning's progress bars count
    the batches of an epoch, but runs here are measured in steps. `enable_progress_bar: false` turns it off.

    Args:
        console: The output; standard output by default.
    """

    def __init__(self, console: SafeConsole | None = None) -> None:
        super().__init__()
        self._console = console or table.console()
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._is_enabled = True
        self._first_step, self._step, self._total = 0, 0, 0
        self._began, self._paused_at, self._printed_at = 0.0, 0.0, 0.0
        self._numbers = ""

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._total = int(total) if 0 < total < float("inf") else 0  # 0: neither max_steps nor the data tell
        self._first_step = self._step = trainer.global_step
        self._began = self._printed_at = time.monotonic()
        self._numbers = ""
        if self._is_enabled:
            self.print(self._headline(trainer, pl_module))
            if self._console.is_terminal:
                self._open(self._count, self._total, self._step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_enabled or trainer.global_step == self._step:  # several micro-batches make one step
            return
        self._step = trainer.global_step
        if is_logged(trainer, self._step):
            self._numbers = numbers(trainer.progress_bar_metrics)
            if time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES:
                self._print_line()
        self._redraw()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused_at = time.monotonic()

    def on_validation_batch_end(self, trainer: L.Trainer, *arguments: Any, **_: Any) -> None:
        self._show_batch(trainer, "validation", trainer.num_val_batches, *arguments[3:])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began += time.monotonic() - self._paused_at  # the speed is that of steps
        if self._is_enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._numbers = numbers(trainer.progress_bar_metrics)
            self._print_line()
            self._redraw()

    def on_test_batch_end(self, trainer: L.Trainer, *arguments: Any, **_: Any) -> None:
        self._show_batch(trainer, "test", trainer.num_test_batches, *arguments[3:])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`trainer.print` above the line."""
        (self._live.console if self._live else self._console).print(*args, soft_wrap=True, **kwargs)

    def _headline(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str:
        decoder: Any = pl_module.model
        device = f"{trainer.world_size} × {pl_module.device.type}" if trainer.world_size > 1 else pl_module.device.type
        begun = f", continuing at step {self._step}" if self._step else ""
        return (
            f"{type(pl_module).__name__}, {decoder.n_parameters():,} parameters, {device}, {trainer.precision}, in "
            f"{trainer.default_root_dir}{begun}"
        )

    def _open(self, description: str, total: float, completed: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[numbers]}"))
        self._live = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._live.add_task(description, total=total or None, completed=completed, numbers="")
        self._live.start()

    def _redraw(self) -> None:
        if self._live is not None:
            shown = "  ".join(filter(None, [self._numbers, self._left]))
            self._live.update(self._task, description=self._count, completed=self._step, numbers=shown)

    def _show_batch(
        self, trainer: L.Trainer, what: str, totals: Sequence[float], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not self._is_enabled or not self._console.is_terminal:
            return
        total = totals[dataloader_idx]
        shown = f"{what} {batch_idx + 1}/{total:.0f}"
        if self._live is None:
            self._open(shown, total, 0)
        assert self._live is not None
        if trainer.state.fn == "fit":
            self._live.update(self._task, numbers=shown)
        else:
            self._live.update(self._task, description=shown, completed=batch_idx + 1)

    def _print_line(self) -> None:
        """Print a line, unless a terminal shows the one that is redrawn."""
        if self._live is None:
            self._printed_at = time.monotonic()
            echo("  ".join(filter(None, [self._count, self._numbers, self._left])))

    @property
    def _count(self) -> str:
        return f"step {self._step}/{self._total or '?'}"

    @property
    def _left(self) -> str:
        """The time left at the mean speed of this process's steps, without validations."""
        done = self._step - self._first_step
        if not self._total or not done:
            return ""
        return f"{clock((time.monotonic() - self._began) / done * (self._total - self._step))} left"

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def numbers(metrics: dict[str, Any]) -> str:
    """Speed, training loss and validation loss from Lightning's progress bar metrics, as far as known."""
    speed, loss, val = (metrics.get(name) for name in ("train/tokens_per_second", "loss", "val/loss"))
    parts = [
        f"{short_number(float(speed))} tokens/s" if speed is not None else "",
        f"loss {float(loss):.3f}" if loss is not None else "",
        f"val {float(val):.3f}" if val is not None else "",
    ]
    return "  ".join(filter(None, parts))


def clock(seconds: float) -> str:
    """252 → 4:12; 90061 → 25:01:01."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
