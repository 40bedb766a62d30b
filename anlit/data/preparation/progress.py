"""How far a preparation is: a bar on a terminal, a line every half minute in a log."""

import sys
import time
from typing import Self

from rich import progress as rich_progress

from anlit.reporting.table import console
from anlit.reporting.text import say

LINE_EVERY_SECONDS = 30


class Progress:
    """Source bytes done of all, tokens per second of this run, and the time that is left at its rate.

    Args:
        size: bytes of all source files.
        done: bytes of those whose tokens are there already.
    """

    def __init__(self, title: str, size: int, done: int) -> None:
        self.title, self.size, self.done, self.before = title, size, done, done
        self.tokens = 0
        self.begun = self.told = time.monotonic()
        self.bar = _bar()
        self.task = self.bar.add_task(title, total=size, completed=done, rate="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def add(self, size: int, tokens: int) -> None:
        """So many source bytes more are done; 0 tokens if they were done by an earlier run."""
        self.done += size
        self.tokens += tokens
        if not tokens:
            self.before += size
        rate = self.tokens / max(time.monotonic() - self.begun, 1e-3)
        self.bar.update(self.task, completed=self.done, rate=f"{rate:,.0f} tokens/s")
        if self.bar.disable and time.monotonic() - self.told > LINE_EVERY_SECONDS:
            self.told = time.monotonic()
            say(f"{self.title}: {self.done / max(self.size, 1):.1%}, {rate:,.0f} tokens/s, {self._left()} left")

    def _left(self) -> str:
        """Time until the end at this run's rate."""
        elapsed = time.monotonic() - self.begun
        seconds = elapsed * (self.size - self.done) / max(self.done - self.before, 1)
        return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"


def _bar() -> rich_progress.Progress:
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TextColumn("{task.fields[rate]}"),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
