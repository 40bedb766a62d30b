"""Short sequences first: the same tokens, cut by optimizer steps."""

from pathlib import Path
from typing import Any

import pytest

from anlit.data.module import TokenShards
from anlit.errors import UserError
from tests.data.modules import LENGTH, Recorder, quiet_trainer, ready

SCHEDULE = {0: 16, 2: 32, 5: LENGTH}
SHAPES = [(16, 16), (16, 16), (8, 32), (8, 32), (8, 32), (4, 64)]


def fit(path: str, schedule: Any, start: Path | None = None, save: Path | None = None, **trainer: Any) -> Recorder:
    model, fitting = Recorder(), quiet_trainer(**{"max_steps": 6, "val_check_interval": 3, **trainer})
    fitting.fit(model, TokenShards(path, 4, context_schedule=schedule), ckpt_path=start)
    if save is not None:
        fitting.save_checkpoint(save)
    return model


def shapes(model: Recorder) -> list[tuple[int, int]]:
    """(B, T) of each batch."""
    return [(len(rows), len(rows[0]) - 1) for rows in model.seen]


def targets(model: Recorder) -> list[int]:
    return [token for rows in model.seen for row in rows for token in row[1:]]


def test_context_schedule_cuts_the_same_tokens_by_optimizer_steps(prepared: str, tmp_path: Path) -> None:
    model = fit(prepared, SCHEDULE)
    assert shapes(model) == SHAPES
    assert model.validated == {LENGTH}
    assert targets(model) == targets(fit(prepared, None))
    accumulated = fit(prepared, SCHEDULE, accumulate_grad_batches=2)
    assert shapes(accumulated) == [shape for shape in SHAPES for _ in range(2)]
    first = fit(prepared, SCHEDULE, save=tmp_path / "3.ckpt", max_steps=3)
    assert shapes(first) + shapes(fit(prepared, SCHEDULE, tmp_path / "3.ckpt")) == SHAPES


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
