"""`Predictions` writes what `predict_step` gave, document by document."""

from itertools import pairwise
from pathlib import Path

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import pytest

from anlit import GPT
from anlit.data import TokenShards
from anlit.training.callbacks import Predictions
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import prepare
from tests.models.tiny import tiny


@pytest.mark.parametrize("token_at", ["end", "start"])
@pytest.mark.parametrize("score_first_token", [True, False])
def test_every_counted_target_is_a_row(tmp_path: Path, token_at: str, score_first_token: bool) -> None:
    data = TokenShards(
        str(prepare(tmp_path / "data", n_val=150, document_token_at=token_at)),
        batch_size=4,
        score_first_token=score_first_token,
    )
    model = tiny(GPT, vocab_size=VOCABULARY)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(accelerator="cpu", callbacks=[Predictions(str(tmp_path))], **dict.fromkeys(names, False))
    predicted = trainer.predict(model, data)
    rows = pq.read_table(tmp_path / "predictions.parquet").to_pylist()
    assert {row["text"] for row in rows} | {row["rank"] for row in rows} == {None}
    targets = np.concatenate([batch["targets"].numpy().flatten() for batch in predicted])
    chances = np.concatenate([batch["log_likelihood"].numpy().flatten() for batch in predicted])
    assert [row["token"] for row in rows] == targets[targets != -100].tolist()
    assert [row["log_likelihood"] for row in rows] == chances[targets != -100].tolist()
    assert (len(rows) == 149) == score_first_token
    for before, row in pairwise(rows):
        separated = before["token"] == END if token_at == "end" else row["token"] == END
        goes_on = row["document"] == before["document"]
        assert not (goes_on and separated)
        if goes_on:
            assert row["position"] == before["position"] + 1
    assert {row["position"] for row in rows if row["token"] == END and token_at == "start"} <= {0}
    assert all(row["n_context"] == row["position"] for row in rows)
