"""Micro-batches that count different numbers of tokens train as the one batch that holds them all."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.callbacks import LossGuard
from tests.data.modules import collate
from tests.nn.models.tiny import (
    ARCHITECTURES,
    CONSTANT,
    GPT,
    SIZE,
    Logged,
    adamw,
    fit,
    random_tokens,
    tiny,
)

SEQUENCES, STEPS = 8, 3


def blocks() -> list[torch.Tensor]:
    """Sequences of many documents, in which few targets count, among such of one."""
    tokens = random_tokens(SEQUENCES * STEPS, SIZE["context_length"] + 1, seed=3)
    tokens[tokens == 0] = 1
    tokens[::3, 1::2] = 0
    return list(tokens)


def train(
    architecture: Any, batch_size: int, score_first_token: bool, accumulate: int | None = None, steps: int = STEPS,
    **trainer: Any,
) -> tuple[dict, dict[str, list[float]]]:  # fmt: skip
    """The weights, and what is logged at each step."""
    model = tiny(architecture, optimizer=adamw(lr=0.01), schedule=CONSTANT, z_loss=0.1)
    loader = DataLoader(
        blocks(), batch_size, collate_fn=partial(collate, score_first_token=score_first_token)
    )
    logged = Logged("train/loss", "train/grad_norm")
    settings = {"precision": "64-true", "gradient_clip_val": 0.5, "callbacks": [logged], **trainer}
    fit(model, steps, accumulate=accumulate or SEQUENCES // batch_size, loader=loader, **settings)
    return model.state_dict(), logged.values


def assert_same(weights: dict, expected: dict) -> None:
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("score_first_token", [False, True])
def test_micro_batches_are_one_batch(architecture: Any, score_first_token: bool) -> None:
    counted = [
        int((collate([block], score_first_token=False).targets != IGNORE_INDEX).sum())
        for block in blocks()
    ]
    assert min(counted) < 0.6 * max(counted)
    whole, expected = train(architecture, SEQUENCES, score_first_token)
    for batch_size in (1, 4):
        weights, logged = train(architecture, batch_size, score_first_token)
        torch.testing.assert_close(logged, expected, rtol=1e-6, atol=0)
        assert_same(weights, whole)


@pytest.mark.parametrize("score_first_token", [False, True])
def test_an_epoch_that_ends_within_a_step_takes_the_mean_of_what_there_is(
    score_first_token: bool,
) -> None:
    """Micro-batches of 2, three to a step, eight in an epoch of which two are left for the last step."""
    weights, _ = train(GPT, 2, score_first_token, accumulate=3, steps=1, limit_train_batches=2)
    whole, _ = train(GPT, 4, score_first_token, accumulate=1, steps=1, limit_train_batches=2)
    assert_same(weights, whole)


def test_the_guard_judges_the_loss_of_the_step() -> None:
    """Of the whole objective, z-loss included."""
    guards = [LossGuard(), LossGuard()]
    for guard, batch_size in zip(guards, (SEQUENCES, 1), strict=True):
        train(GPT, batch_size, False, callbacks=[guard])
    assert list(guards[0].losses) == pytest.approx(list(guards[1].losses), rel=1e-6)


@pytest.mark.parametrize(
    "setting", [{"gradient_clip_val": None}, {"gradient_clip_algorithm": "value"}]
)
def test_without_a_norm_to_clip_to_gradients_are_only_measured(
    setting: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr("anlit.training.language_model.clip_grads_with_norm_", None)
    _, logged = train(GPT, SEQUENCES, False, **setting)
    assert min(logged["train/grad_norm"]) > 0.01


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_negative_bound_of_the_gradients_is_refused(algorithm: str) -> None:
    """It would turn them round, and the loss would rise."""
    with pytest.raises(UserError, match=r"trainer\.gradient_clip_val=-1 is out of range"):
        fit(tiny(GPT), 1, gradient_clip_val=-1, gradient_clip_algorithm=algorithm)
