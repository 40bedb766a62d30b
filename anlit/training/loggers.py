"""metrics.csv that is continued on resume, where Lightning's logger deletes the old rows; TensorBoard's HPARAMS tab."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment

from anlit.lightning_internals import MetricsWriter, experiment_of
from anlit.reading import number, read_rows
from anlit.reporting.files import replacing
from anlit.runs.groups import flatten


class _AppendingWriter(MetricsWriter):
    def keep_existing(self) -> None:
        """Continue the existing file under its header; drop a last line that is incomplete."""
        path = Path(self.metrics_file_path)
        if path.is_file():
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                path.write_bytes(content[: content.rfind(b"\n") + 1])
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def rewrite(self, header: list[str]) -> None:
        """Rewrite the file with a new header, atomically, so that a kill loses nothing."""
        path = Path(self.metrics_file_path)
        _write_rows(path, header, read_rows(path))


def _write_rows(path: Path, fieldnames: list[str], rows: list[dict[str, str]]) -> None:
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=fieldnames)
        writer.writeheader()
        writer.writerows(rows)


class CSVLogger(LightningCSVLogger):
    """Writes `metrics.csv` into the run folder, row by row, appending after a resume."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=1)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return experiment_of(self, lambda: _AppendingWriter(log_dir=self.log_dir))

    def cut(self, step: int) -> list[dict[str, str]]:
        """Remove the rows of step `step` (from 0) and of later ones; returns the rows that stay."""
        path = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
        if not path.is_file():
            return []
        rows = read_rows(path)
        kept = [row for row in rows if number(row, "step", path) < step]
        if len(kept) < len(rows):
            _write_rows(path, list(rows[0]), kept)
        return kept


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
