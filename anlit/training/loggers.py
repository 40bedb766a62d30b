"""metrics.csv that is continued on resume, where Lightning's logger deletes the old rows; TensorBoard's HPARAMS tab."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from anlit.reading import number, read_rows
from anlit.reporting.files import replacing
from anlit.runs.folders import METRICS
from anlit.runs.groups import flatten


class CSVLogger(Logger):
    """Writes `metrics.csv` into the run folder, row by row, appending after a resume, and `hparams.yaml`."""

    name = version = ""

    def __init__(self, run_dir: str) -> None:
        super().__init__()
        self.path = Path(run_dir) / METRICS
        self._columns: list[str] = []

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(self.path.with_name("hparams.yaml"), params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": step, **convert_tensors_to_scalars(metrics)}
        if not row.keys() <= {*self._columns}:
            self.rewrite(more_columns=row)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def rewrite(self, before: float = math.inf, more_columns: Iterable[str] = ()) -> list[dict[str, str]]:
        """Write the rows of steps (from 0) below `before` anew, so that a kill loses nothing; returns them."""
        rows = read_rows(self.path) if self.path.is_file() else []
        self._columns = sorted({*more_columns, *(rows[0] if rows else [])})
        rows = [row for row in rows if number(row, "step", self.path) < before]
        if self._columns:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial, partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
        return rows


def log_settings(logger: Logger, settings: dict[str, Any]) -> None:
    """Write a run's settings to a logger: hparams.yaml, and TensorBoard's HPARAMS tab with val/loss.

    Lightning would add a value of its own to the curve; TensorBoard itself takes the curve's last one.
    """
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(settings)
        return
    from torch.utils.tensorboard.summary import hparams  # only who logs to TensorBoard needs it

    logger.hparams.update(settings)
    for summary in hparams(dict(flatten(settings)), {"val/loss": 0.0}):
        logger.experiment.file_writer.add_summary(summary)
