"""Short sequences first: the same tokens, cut by optimizer steps."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from tests.data.modules import LENGTH, quiet_trainer, ready


class Lengths(L.LightningModule):
    """Records the shapes and targets that it is trained and validated on."""

    context_length = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.validated: set[int] = set()
        self.targets: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.global_step, tuple(batch.tokens.shape)))
        self.targets.append(batch.targets.flatten())
        return self.weight.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.add(batch.tokens.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_lengths(data: TokenShards, checkpoint: str | None = None, **trainer: Any) -> tuple[Lengths, L.Trainer]:
    model, fitting = Lengths(), quiet_trainer(**{"max_steps": 6, "val_check_interval": 3, **trainer})
    fitting.fit(model, data, ckpt_path=checkpoint)
    return model, fitting


def test_context_schedule_cuts_the_same_tokens_by_optimizer_steps(prepared: str, tmp_path: Path) -> None:
    schedule = {0: 16, 2: 32, 5: LENGTH}
    expected = [(0, (16, 16)), (1, (16, 16)), (2, (8, 32)), (3, (8, 32)), (4, (8, 32)), (5, (4, 64))]
    model, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule))
    plain, _ = fit_lengths(TokenShards(prepared, 4))
    assert model.seen == expected
    assert model.validated == {LENGTH}
    assert torch.equal(torch.cat(model.targets), torch.cat(plain.targets))
    accumulated, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), accumulate_grad_batches=2)
    assert accumulated.seen == [step for step in expected for _ in range(2)]
    first, trainer = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), max_steps=3)
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    second, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), str(tmp_path / "3.ckpt"))
    assert first.seen + second.seen == expected


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        ({5: 64}, "does not begin at step 0"),
        ({}, "does not begin at step 0"),
        ({-1: 32, 0: 64}, "does not begin at step 0"),
        ({0: 48, 5: 64}, "has length 48 at step 0, which does not divide the context length 64"),
        ({0: 0, 5: 64}, "has length 0 at step 0"),
        ({0: 64, 5: 32}, "ends with 32 and the context length is 64: end it with 64"),
    ],
)
def test_context_schedules_that_do_not_fit(prepared: str, schedule: dict[int, int], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(prepared, context_schedule=schedule)
