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

SCHEDULE = {0: 16, 2: 32, 5: LENGTH}
SHAPES = [(0, (16, 16)), (1, (16, 16)), (2, (8, 32)), (3, (8, 32)), (4, (8, 32)), (5, (4, 64))]


class Lengths(L.LightningModule):
    """Records the shapes and targets that it is trained and validated on."""

    context_length = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.validated: set[int] = set()
        self.targets: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.global_step, tuple(batch.tokens.shape)))
        self.targets += batch.targets.flatten().tolist()
        return self.weight.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.add(batch.tokens.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(path: str, schedule: Any, start: Path | None = None, save: Path | None = None, **trainer: Any) -> Lengths:
    model, fitting = Lengths(), quiet_trainer(**{"max_steps": 6, "val_check_interval": 3, **trainer})
    fitting.fit(model, TokenShards(path, 4, context_schedule=schedule), ckpt_path=start)
    if save is not None:
        fitting.save_checkpoint(save)
    return model


def test_context_schedule_cuts_the_same_tokens_by_optimizer_steps(prepared: str, tmp_path: Path) -> None:
    model = fit(prepared, SCHEDULE)
    assert model.seen == SHAPES
    assert model.validated == {LENGTH}
    assert model.targets == fit(prepared, None).targets
    accumulated = fit(prepared, SCHEDULE, accumulate_grad_batches=2)
    assert accumulated.seen == [step for step in SHAPES for _ in range(2)]
    first = fit(prepared, SCHEDULE, save=tmp_path / "3.ckpt", max_steps=3)
    assert first.seen + fit(prepared, SCHEDULE, tmp_path / "3.ckpt").seen == SHAPES


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
