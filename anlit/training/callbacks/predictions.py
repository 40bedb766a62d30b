"""`anlit predict` into a file: the validation split's log-likelihoods, in the columns of `anlit score`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter

from anlit.data.batch import TokenAt, document_ids
from anlit.errors import UserError
from anlit.targets import IGNORED

if TYPE_CHECKING:
    from anlit.reporting.token_table import TokenTable


class Predictions(BasePredictionWriter):
    """Writes RUN_DIR/predictions.parquet while `predict` runs. With several ranks each writes predictions-rank0 ….

    The table has every target that counts in the loss. A document that continues in the next sequence counts as two
    documents. `byte_start`, `byte_end` and `rank` are null, because prepared data has tokens and no texts; `anlit
    score` writes them.

    Args:
        run_dir: The run folder.
    """

    def __init__(self, run_dir: str) -> None:
        super().__init__(write_interval="batch")
        self.run_dir = Path(run_dir)
        self._table: TokenTable | None = None
        self._documents = 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from anlit.reporting.token_table import TokenTable  # pyarrow takes time, and training does without it

        data = _data(trainer)
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self.run_dir / f"predictions{rank}.parquet"
        self._table, self._documents = TokenTable(path, _tokenizer(data), {"data": data.fingerprint}), 0

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        manifest = _data(trainer).manifest
        arrays = (prediction[name].cpu().numpy() for name in ("tokens", "targets", "log_likelihood"))
        for tokens, targets, log_likelihood in zip(*arrays, strict=True):
            self._add(tokens, targets, log_likelihood, manifest["end_of_document"], manifest["document_token_at"])

    def _add(
        self, tokens: np.ndarray, targets: np.ndarray, log_likelihood: np.ndarray, separator: int, at: TokenAt
    ) -> None:
        """Add the targets of one sequence, document by document; each array is (T,)."""
        from anlit.reporting.token_table import Scores

        assert self._table is not None
        last = targets[-1:] if targets[-1] != IGNORED else tokens[-1:]
        sequence = np.concatenate((tokens, last))
        ids = document_ids(sequence[None], separator, at)[0]
        positions = np.arange(len(ids)) - np.searchsorted(ids, ids)  # ids do not decrease
        counted = targets != IGNORED
        for document in np.unique(ids[1:][counted]):
            index = np.flatnonzero(counted & (ids[1:] == document))
            of_document = positions[1:][index]
            ranks = np.zeros(len(index), np.int32)
            scores = Scores(targets[index], log_likelihood[index], ranks, of_document.astype(np.int32))
            self._table.add(self._documents, scores, None, of_document)
            self._documents += 1

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._table is not None
        self._table.close()
        trainer.print(f"{self._table.path}: the log-likelihoods of {self._documents:,} documents")
        self._table = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._table is not None:
            self._table.close(complete=False)
        self._table = None


def _data(trainer: L.Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]


def _tokenizer(data: Any) -> Any:
    """The tokenizer of the data; None if the data came as tokens."""
    try:
        return data.tokenizer
    except UserError:
        return None
