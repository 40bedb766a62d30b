"""A logger that keeps what it is told."""

from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger


class Recorder(DummyLogger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.setdefault(int(step or 0), {}).update(metrics)

    def steps_with(self, name: str) -> list[int]:
        return [step for step, row in self.rows.items() if name in row]
