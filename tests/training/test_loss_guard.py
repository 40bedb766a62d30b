"""Bad steps are skipped, and training continues as if their batches did not exist."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit import GPT, NGPT, AnGPT, MuonAdamW
from anlit.errors import UserError
from anlit.training.callbacks import LossGuard
from anlit.training.language_model import LanguageModel
from tests.data.modules import collate
from tests.nn.models.tiny import CONSTANT, adamw, fit, random_tokens, tiny
from tests.training.poison import Poison, PoisonGradient


def train(
    batch_numbers: Iterable[int],
    *callbacks: L.Callback,
    architecture: Any = GPT,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw(lr=0.01, weight_decay=0.1),
    accumulate: int = 1,
    **settings: Any,
) -> LanguageModel:
    """Train on the batches of these numbers, two sequences each, `accumulate` batches a step."""
    sequences: list[torch.Tensor] = []
    for number in batch_numbers:
        sequences += random_tokens(2, 17, seed=number)
    model = tiny(architecture, optimizer=optimizer, schedule=CONSTANT, **settings)
    loader = DataLoader(sequences, batch_size=2, collate_fn=collate)
    return fit(
        model,
        max_steps=-1,
        batch_size=0,
        accumulate=accumulate,
        loader=loader,
        max_epochs=1,
        callbacks=list(callbacks),
        log_every_n_steps=1,
    )


QK_CLIP = {"qk_clip": 1e-3, "kernel": "eager"}


def assert_same(actual: LanguageModel, expected: LanguageModel, atol: float = 0) -> None:
    """Weights and the optimizer's state are equal."""
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=atol)
    state = optimizer_state(actual)
    torch.testing.assert_close(state, optimizer_state(expected), rtol=0, atol=atol)


def optimizer_state(model: LanguageModel) -> dict[str, Any]:
    (optimizer,) = model.trainer.optimizers
    return optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("n_batches", "bad_batch", "dropped_batches", "settings"),
    [
        pytest.param(6, 3, [3], {}, id="GPT"),
        pytest.param(6, 3, [3], {"optimizer": MuonAdamW}, id="Muon"),
        pytest.param(6, 3, [3], {"architecture": NGPT}, id="NGPT"),
        pytest.param(6, 3, [3], {"architecture": AnGPT}, id="AnGPT"),
        pytest.param(4, 0, [0], {}, id="the first step"),
        pytest.param(8, 5, [4, 5], {"accumulate": 2}, id="a micro-batch spoils its step"),
        pytest.param(4, 3, [3], QK_CLIP, id="QK-clip"),
    ],
)
def test_a_nan_step_leaves_no_trace(
    n_batches: int, bad_batch: int, dropped_batches: list[int], settings: dict[str, Any]
) -> None:
    guard = LossGuard(on_nan="skip")
    good_batches = [number for number in range(n_batches) if number not in dropped_batches]
    # nGPT and anGPT scale weight rows once more.
    tolerance = 1e-5 if "architecture" in settings else 0

    spoilt = train(range(n_batches), Poison([bad_batch]), guard, **settings)
    good = train(good_batches, **settings)

    assert_same(spoilt, good, atol=tolerance)
    assert guard.skipped == 1
    assert spoilt.trainer.global_step == n_batches // len(dropped_batches)


def test_endless_skipping_ends_with_a_user_error() -> None:
    guard = LossGuard(on_nan="skip", limit=3)
    message = r"at step 5 loss nan, and 4 of the last 6 steps were bad: lower the learning"

    with pytest.raises(UserError, match=message):
        train(range(20), PoisonGradient(1, spoils_weight=True), guard)

    assert guard.skipped == 3


def test_on_nan_stop_ends_at_the_first_bad_step() -> None:
    guard = LossGuard(on_nan="stop")

    with pytest.raises(UserError, match=r"at step 3 loss nan: lower the learning rate"):
        train(range(6), Poison([3]), guard)


def test_a_spike_is_skipped_and_logged(caplog) -> None:
    guard = LossGuard(on_spike="skip", window=16)

    spoilt = train(range(24), Poison([20], factor=30.0), guard)

    good = train([*range(20), 21, 22, 23])
    assert_same(spoilt, good)
    assert guard.skipped == 1
    assert int(spoilt.trainer.logged_metrics["guard/skipped"]) == 1
    (line,) = lines_of_step_20(caplog)
    assert line.endswith("standard deviations above the mean of recent steps, the step was skipped")


def test_a_spike_can_be_ignored(caplog) -> None:
    guard = LossGuard(on_spike="ignore", window=16)

    spoilt = train(range(24), Poison([20], factor=30.0), guard)

    assert guard.skipped == 0
    assert int(spoilt.trainer.logged_metrics["guard/skipped"]) == 0
    assert lines_of_step_20(caplog) == []


def lines_of_step_20(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("step 20: loss")]


GOOD = [
    (3.0, 1.0),
    (3.1, 1.1),
    (3.2, 1.0),
    (3.0, 1.1),
    (3.1, 1.0),
    (3.2, 1.1),
    (3.0, 1.0),
    (3.1, 1.1),
]
"""Loss and gradient norm of good steps, which fill a window."""
SPIKES = [
    (4.9, 1.0),
    (3.0, 9.0),
    (math.nan, 1.0),
    (3.0, math.inf),
]
LOW = [
    (2.0, 0.1),
    (3.1, 1.1),
]
"""A step below the mean is good."""
USUAL = (3.0, 1.0)


@pytest.mark.parametrize(
    ("numbers", "skipped"),
    [
        pytest.param([*GOOD, *SPIKES, *LOW], [8, 9, 10, 11], id="spikes"),
        pytest.param(
            [USUAL, USUAL, (90.0, 1.0), USUAL],
            [],
            id="half the window is not full",
        ),
        pytest.param(
            [*[USUAL] * 8, (3.0001, 1.0), (3.1, 1.0)],
            [9],
            id="a loss that hardly changes",
        ),
    ],
)
def test_a_step_far_above_recent_good_steps_is_bad(
    numbers: list[tuple[float, float]], skipped: list[int]
) -> None:
    guard = LossGuard(on_spike="skip", window=8)

    bad_steps = []
    good = []
    for step, (loss, norm) in enumerate(numbers):
        if guard.judge(loss, norm) is None:
            good.append((loss, norm))
        else:
            bad_steps.append(step)

    assert bad_steps == skipped
    compared = list(zip(guard.losses, guard.norms, strict=True))
    assert compared == good[-8:]


def test_clipping_by_value_is_refused() -> None:
    trainer: Any = SimpleNamespace(gradient_clip_algorithm="value")

    with pytest.raises(UserError, match="gradient_clip_algorithm to norm"):
        LossGuard().on_train_start(trainer, tiny(GPT))


def test_a_window_of_one_step_is_refused() -> None:
    with pytest.raises(UserError, match="window=1"):
        LossGuard(window=1)
