"""Bad steps are skipped, and training goes on as if their batches had not been there."""

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
    which: Iterable[int], *callbacks: L.Callback, architecture: Any = GPT,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw(lr=0.01, weight_decay=0.1), accumulate: int = 1,
    **settings: Any,
) -> LanguageModel:  # fmt: skip
    """One optimizer step for every `accumulate` of the batches numbered `which`, each of two sequences of its own."""
    blocks = [block for number in which for block in random_tokens(2, 17, seed=number)]
    model = tiny(architecture, optimizer=optimizer, schedule=CONSTANT, **settings)
    loader = DataLoader(blocks, batch_size=2, collate_fn=collate)
    return fit(
        model,
        -1,
        0,
        accumulate,
        loader,
        max_epochs=1,
        callbacks=list(callbacks),
        log_every_n_steps=1,
    )


def assert_same(one: LanguageModel, two: LanguageModel, atol: float = 0) -> None:
    """Weights and the optimizer's state."""
    states = [
        (model.state_dict(), model.trainer.optimizers[0].state_dict()["state"])
        for model in (one, two)
    ]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=atol)


@pytest.mark.parametrize(("n_batches", "bad", "dropped", "settings"), [
    pytest.param(6, 3, [3], {}, id="GPT"),
    pytest.param(6, 3, [3], {"optimizer": MuonAdamW}, id="Muon"),
    pytest.param(6, 3, [3], {"architecture": NGPT}, id="NGPT"),
    pytest.param(6, 3, [3], {"architecture": AnGPT}, id="AnGPT"),
    pytest.param(4, 0, [0], {}, id="the first step"),
    pytest.param(8, 5, [4, 5], {"accumulate": 2}, id="a micro-batch spoils its step"),
    pytest.param(4, 3, [3], {"qk_clip": 1e-3, "kernel": "eager"}, id="QK-clip"),
])  # fmt: skip
def test_a_nan_step_leaves_no_trace(
    n_batches: int, bad: int, dropped: list[int], settings: dict[str, Any]
) -> None:
    guard = LossGuard(on_nan="skip")
    spoilt = train(range(n_batches), Poison([bad]), guard, **settings)
    good = train([number for number in range(n_batches) if number not in dropped], **settings)
    assert_same(
        spoilt, good, atol=1e-5 if "architecture" in settings else 0
    )  # weight rows are scaled once more
    assert (guard.skipped, spoilt.trainer.global_step) == (1, n_batches // len(dropped))


def test_endless_skipping_ends_with_a_user_error() -> None:
    guard = LossGuard(on_nan="skip", limit=3)
    with pytest.raises(
        UserError,
        match=r"at step 5 loss nan, and 4 of the last 6 steps were bad: lower the learning",
    ):
        train(range(20), PoisonGradient(1, spoils_weight=True), guard)
    assert guard.skipped == 3
    with pytest.raises(UserError, match=r"at step 3 loss nan: lower the learning rate"):
        train(range(6), Poison([3]), LossGuard(on_nan="stop"))


@pytest.mark.parametrize("action", ["ignore", "skip"])
def test_a_spike_is_skipped_or_ignored_and_said(action: Any, caplog) -> None:
    guard = LossGuard(on_spike=action, window=16)
    spoilt = train(range(24), Poison([20], factor=30.0), guard)
    lines = [message for message in caplog.messages if message.startswith("step 20: loss")]
    assert (
        len(lines)
        == guard.skipped
        == int(spoilt.trainer.logged_metrics["guard/skipped"])
        == (action == "skip")
    )
    if action == "skip":
        assert_same(spoilt, train([*range(20), 21, 22, 23]))
        assert lines[0].endswith(
            "standard deviations above the mean of recent steps, the step was skipped"
        )


GOOD = [(3.0 + 0.1 * (i % 3), 1.0 + 0.1 * (i % 2)) for i in range(8)]


@pytest.mark.parametrize(("numbers", "skipped"), [
    ([*GOOD, (4.9, 1.0), (3.0, 9.0), (math.nan, 1.0), (3.0, math.inf), (2.0, 0.1), (3.1, 1.1)], [8, 9, 10, 11]),
    ([(3.0, 1.0), (3.0, 1.0), (90.0, 1.0), (3.0, 1.0)], []),  # half the window is not full
    ([*[(3.0, 1.0)] * 8, (3.0001, 1.0), (3.1, 1.0)], [9]),  # of a loss that hardly changes
])  # fmt: skip
def test_what_counts_as_bad(numbers: list[tuple[float, float]], skipped: list[int]) -> None:
    guard = LossGuard(on_spike="skip", window=8)
    assert [step for step, pair in enumerate(numbers) if guard.judge(*pair)] == skipped
    good = [pair for step, pair in enumerate(numbers) if step not in skipped][-8:]
    assert [*zip(guard.losses, guard.norms, strict=True)] == good  # bad ones are not compared with


def test_settings_that_a_guard_cannot_work_with() -> None:
    trainer: Any = SimpleNamespace(gradient_clip_algorithm="value")
    with pytest.raises(UserError, match="gradient_clip_algorithm to norm"):
        LossGuard().on_train_start(trainer, tiny(GPT))
    with pytest.raises(UserError, match="window=1"):
        LossGuard(window=1)
