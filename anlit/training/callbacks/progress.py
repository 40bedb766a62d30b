"""The progress of a run in one line: redrawn in a terminal, printed now and then in a log file."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TextColumn

from anlit.reporting import table
from anlit.reporting.table import SafeConsole
from anlit.reporting.text import echo, short_number
from anlit.training.lightning_internals import is_logged, validation_follows

SECONDS_BETWEEN_LINES = 10.0  # in a log file; a validation's result is always printed


class RunProgress(ProgressBar):
    """Shows `step 120/1950 ━━━━ 12.3k tokens/s  loss 3.214  val 3.301  0:04:12 left`.

    The numbers change at logged steps only, where the host waits for the device anyway. Lightning's progress bars count
    the batches of an epoch, but runs here are measured in steps. `enable_progress_bar: false` turns it off.

    Args:
        console: The output; standard output by default.
    """

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
        self._first_step, self._step, self._total = 0, 0, 0
        self._began, self._paused_at, self._printed_at = 0.0, 0.0, 0.0
        self._numbers = ""
        self._is_logged = False

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`trainer.print` above the line."""
        if self._is_enabled:
            self._console.print(*args, soft_wrap=True, **kwargs)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        self._total = (
            int(total) if 0 < total < float("inf") else 0
        )  # 0: neither max_steps nor the data tell
        self._first_step = self._step = trainer.global_step
        self._began = self._printed_at = time.monotonic()
        device = (
            f"{trainer.world_size} × {pl_module.device.type}"
            if trainer.world_size > 1
            else pl_module.device.type
        )
        begun = f", continuing at step {self._step}" if self._step else ""
        self.print(
            f"{type(pl_module).__name__}, {pl_module.model.n_parameters():,} parameters, {device}, {trainer.precision},"
            f" peak rate {rates_in_words(pl_module.peak_rates())}, in {trainer.default_root_dir}{begun}"
        )
        self._show("")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # several micro-batches make one step
            return
        self._step = trainer.global_step
        self._is_logged = is_logged(trainer, self._step)
        if self._is_logged:
            self._numbers = numbers(trainer.progress_bar_metrics)
        due = time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES
        # A step that is validated has its line after that.
        as_line = due and self._is_logged and not validation_follows(trainer)
        self._show(self._status, as_line)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused_at = time.monotonic()

    def on_validation_batch_end(self, trainer: L.Trainer, *given: Any) -> None:
        self._draw_evaluation(trainer, "validation", given[3] + 1, trainer.num_val_batches[0])

    def on_test_batch_end(self, trainer: L.Trainer, *given: Any) -> None:
        self._draw_evaluation(trainer, "test", given[3] + 1, trainer.num_test_batches[0])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began += time.monotonic() - self._paused_at  # the speed is that of steps
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = dict(trainer.progress_bar_metrics)
            if not self._is_logged:  # it is that of an earlier step, or of one rank
                metrics.pop("loss", None)
            self._numbers = numbers(metrics)
            self._show(self._status, as_line=True)

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._line.live.is_started:
            self._line.stop()

    def on_exception(self, *_: Any) -> None:
        self.teardown()

    def _draw_evaluation(self, trainer: L.Trainer, what: str, n_batches: int, total: float) -> None:
        shown = f"{what} {n_batches}/{total:.0f}"
        if trainer.state.fn == "fit":
            self._show(shown)
        else:
            self._draw(shown, n_batches, total)

    def _show(self, status: str, as_line: bool = False) -> None:
        """Redraw the line of a terminal; where there is none, print it if asked to."""
        count = f"step {self._step}/{self._total or '?'}"
        self._draw(count, self._step, self._total, status)
        if as_line and self._is_enabled and not self._console.is_terminal:
            self._printed_at = time.monotonic()
            echo("  ".join(filter(None, [count, status])))

    def _draw(self, description: str, completed: int, total: float, status: str = "") -> None:
        if self._is_enabled and self._console.is_terminal:
            self._line.start()
            settings: dict[str, Any] = {
                "completed": completed,
                "total": total or None,
                "status": status,
            }
            self._line.update(self._task, description=description, **settings)

    @property
    def _status(self) -> str:
        """The numbers, and the time left at the mean speed of this process's steps, without validations."""
        left, done = "", self._step - self._first_step
        if self._total and done:
            seconds = (time.monotonic() - self._began) / done * (self._total - self._step)
            left = f"{timedelta(seconds=round(seconds))} left"
        return "  ".join(filter(None, [self._numbers, left]))


def numbers(metrics: dict[str, Any]) -> str:
    """Speed, training loss and validation loss from Lightning's progress bar metrics, as far as known."""
    forms = {
        "train/tokens_per_second": lambda x: f"{short_number(x)} tokens/s",
        "loss": lambda x: f"loss {x:.3f}",
        "val/loss": lambda x: f"val {x:.3f}",
    }
    return "  ".join(form(float(metrics[name])) for name, form in forms.items() if name in metrics)


def rates_in_words(rates: dict[str, float]) -> str:
    """The rate of each parameter group, or the one that all share."""
    if len(set(rates.values())) == 1:
        return f"{next(iter(rates.values())):.3g}"
    return " ".join(f"{name} {rate:.3g}" for name, rate in rates.items())
