"""Micro-batches with different numbers of counted tokens train as a single large batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from anlit import GPT
from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.callbacks import LossGuard
from tests.data.modules import collate
from tests.nn.models.tiny import (
    ARCHITECTURES,
    CONSTANT,
    SIZE,
    Logged,
    adamw,
    fit,
    next_token_loss,
    random_tokens,
    tiny,
)

N_SEQUENCES = 8
"""Sequences in a step."""
N_STEPS = 3


def blocks() -> list[torch.Tensor]:
    """Sequences; every third has many documents, so that few targets count."""
    tokens = random_tokens(N_SEQUENCES * N_STEPS, SIZE["context_length"] + 1, seed=3)
    tokens[tokens == 0] = 1
    tokens[::3, 1::2] = 0
    return list(tokens)


def train(
    architecture: Any,
    batch_size: int,
    score_first_token: bool,
    accumulate: int | None = None,
    n_steps: int = N_STEPS,
    **trainer: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    """The weights, and the values that each step logs."""
    model = tiny(architecture, optimizer=adamw(lr=0.01), schedule=CONSTANT, z_loss=0.1)
    collate_fn = partial(collate, score_first_token=score_first_token)
    loader = DataLoader(blocks(), batch_size, collate_fn=collate_fn)
    logged = Logged("train/loss", "train/grad_norm")
    if accumulate is None:
        accumulate = N_SEQUENCES // batch_size
    settings = {"precision": "64-true", "gradient_clip_val": 0.5, "callbacks": [logged], **trainer}
    fit(model, n_steps, accumulate=accumulate, loader=loader, **settings)
    return model.state_dict(), logged.values


def assert_same_weights(weights: dict, expected: dict) -> None:
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def count_targets(block: torch.Tensor) -> int:
    targets = collate([block], score_first_token=False).targets
    return int((targets != IGNORE_INDEX).sum())


def test_the_sequences_count_different_numbers_of_targets() -> None:
    n_targets = list(map(count_targets, blocks()))

    assert min(n_targets) < 0.6 * max(n_targets)


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("score_first_token", [False, True])
def test_micro_batches_train_as_a_single_batch(architecture: Any, score_first_token: bool) -> None:
    expected_weights, expected = train(architecture, N_SEQUENCES, score_first_token)

    for batch_size in (1, 4):
        weights, logged = train(architecture, batch_size, score_first_token)

        torch.testing.assert_close(logged, expected, rtol=1e-6, atol=0)
        assert_same_weights(weights, expected_weights)


@pytest.mark.parametrize("score_first_token", [False, True])
def test_a_step_that_the_end_of_the_epoch_cuts_short_takes_the_mean_of_its_micro_batches(
    score_first_token: bool,
) -> None:
    """The epoch has two micro-batches of two sequences; a step would have three."""
    one_step = {"n_steps": 1, "limit_train_batches": 2}

    weights, _ = train(GPT, 2, score_first_token, accumulate=3, **one_step)
    expected_weights, _ = train(GPT, 4, score_first_token, accumulate=1, **one_step)

    assert_same_weights(weights, expected_weights)


class WithTerms(GPT):
    """Adds a penalty of weights, and a mean over counted tokens, to anlit's objective."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        objective = super().training_step(batch, batch_idx)
        is_counted = batch.targets != IGNORE_INDEX
        return objective + penalty(self) + mean_square(self, batch, is_counted)


def penalty(model: Any) -> torch.Tensor:
    return 0.5 * model.model.head.weight.square().sum()


def mean_square(model: Any, batch: Any, is_counted: torch.Tensor) -> torch.Tensor:
    return model(batch.tokens, batch.document_ids)[is_counted].square().mean()


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("score_first_token", [False, True])
def test_terms_after_anlits_training_step_count_as_in_a_single_batch(
    batch_size: int, score_first_token: bool
) -> None:
    """The change of weights by SGD is the gradient of the naive objective."""
    sgd = partial(torch.optim.SGD, lr=1.0)
    collate_fn = partial(collate, score_first_token=score_first_token)
    sequences = blocks()[:N_SEQUENCES]
    model = tiny(WithTerms, optimizer=sgd, schedule=CONSTANT).double()
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    whole = collate_fn(sequences)
    is_counted = whole.targets != IGNORE_INDEX
    loss, _ = next_token_loss(model(whole.tokens, whole.document_ids), whole.targets)
    naive = loss + penalty(model) + mean_square(model, whole, is_counted)
    gradients = torch.autograd.grad(naive, list(model.parameters()))

    loader = DataLoader(sequences, batch_size, collate_fn=collate_fn)
    settings = {"precision": "64-true", "gradient_clip_val": None}
    fit(model, 1, accumulate=N_SEQUENCES // batch_size, loader=loader, **settings)

    changes = {}
    expected = {}
    for (name, weight), gradient in zip(model.named_parameters(), gradients, strict=True):
        changes[name] = initial[name] - weight.detach()
        expected[name] = gradient
    torch.testing.assert_close(changes, expected, rtol=0, atol=1e-10)


def test_anlits_training_step_is_refused_twice_for_a_batch() -> None:
    class Twice(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            first = super().training_step(batch, batch_idx)
            return first + super().training_step(batch, batch_idx)

    with pytest.raises(UserError, match=r"super\(\)\.training_step twice for a batch"):
        fit(tiny(Twice), 1)


def test_a_batch_that_a_subclass_skips_is_no_second_call() -> None:
    class Skipping(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            objective = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else objective

    assert fit(tiny(Skipping), 2).trainer.fit_loop.epoch_loop.total_batch_idx == 1


def test_the_guard_judges_the_loss_of_the_step() -> None:
    """The guard's loss is the whole objective, with the z-loss."""
    whole_batch = LossGuard()
    micro_batches = LossGuard()

    train(GPT, N_SEQUENCES, False, callbacks=[whole_batch])
    train(GPT, 1, False, callbacks=[micro_batches])

    assert list(whole_batch.losses) == pytest.approx(list(micro_batches.losses), rel=1e-6)


@pytest.mark.parametrize(
    "setting", [{"gradient_clip_val": None}, {"gradient_clip_algorithm": "value"}]
)
def test_without_a_norm_to_clip_to_gradients_are_only_measured(
    setting: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr("anlit.training.language_model.clip_grads_with_norm_", None)

    _, logged = train(GPT, N_SEQUENCES, False, **setting)

    assert min(logged["train/grad_norm"]) > 0.01


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_negative_bound_of_the_gradients_is_refused(algorithm: str) -> None:
    """It would reverse the gradients, and the loss would rise."""
    with pytest.raises(UserError, match=r"trainer\.gradient_clip_val=-1 is out of range"):
        fit(tiny(GPT), 1, gradient_clip_val=-1, gradient_clip_algorithm=algorithm)
