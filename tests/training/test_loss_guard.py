"""Bad steps are skipped, and training goes on as if their batches had not been there."""

import logging
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit import GPT, NGPT, AnGPT
from anlit.errors import UserError
from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import MuonAdamW
from anlit.training.callbacks import LossGuard
from tests.data.blocks import collate
from tests.models.tiny import CONSTANT, adamw, random_tokens, tiny
from tests.training.poison import Poison, PoisonGradient

ADAMW = adamw(lr=0.01, weight_decay=0.1)
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def train(
    which: Iterable[int],
    *callbacks: L.Callback,
    architecture: Any = GPT,
    optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW,
    accumulate: int = 1,
    settings: dict[str, Any] | None = None,
    **trainer: Any,
) -> tuple[LanguageModel, L.Trainer]:
    """One optimizer step for every `accumulate` of the batches numbered `which`, each of two sequences of its own."""
    blocks = [block for number in which for block in random_tokens(2, 17, seed=number)]
    model = tiny(architecture, optimizer=optimizer, schedule=CONSTANT, **(settings or {}))
    loader = DataLoader(blocks, batch_size=2, collate_fn=collate)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "gradient_clip_val": 1.0, **QUIET, **trainer}
    fitter = L.Trainer(accumulate_grad_batches=accumulate, callbacks=list(callbacks), **options)
    fitter.fit(model, loader)
    return model, fitter


def assert_same(one: tuple[LanguageModel, L.Trainer], two: tuple[LanguageModel, L.Trainer], atol: float = 0) -> None:
    """Weights and the optimizer's state."""
    for (name, a), (_, b) in zip(one[0].state_dict().items(), two[0].state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=name)
    states = [trainer.optimizers[0].state_dict()["state"] for _, trainer in (one, two)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for key, value in state.items():
            torch.testing.assert_close(value, states[1][number][key], rtol=0, atol=atol, msg=f"{number}.{key}")


@pytest.mark.parametrize(
    ("architecture", "optimizer", "atol"),
    [(GPT, ADAMW, 0), (GPT, MuonAdamW, 0), (NGPT, ADAMW, 1e-5), (AnGPT, ADAMW, 1e-5)],  # weight rows scaled once more
)
def test_a_nan_step_leaves_no_trace(architecture: Any, optimizer: Any, atol: float) -> None:
    guard = LossGuard(on_nan="skip")
    options = {"architecture": architecture, "optimizer": optimizer}
    spoilt = train(range(6), Poison([3]), guard, **options)
    assert_same(spoilt, train([0, 1, 2, 4, 5], **options), atol)
    assert (guard.skipped, spoilt[1].global_step) == (1, 6)


@pytest.mark.parametrize("first", [0, 3])
def test_nothing_is_left_of_a_first_step(first: int) -> None:
    spoilt = train(range(first, first + 4), Poison([0]), LossGuard(on_nan="skip"))
    assert_same(spoilt, train(range(first + 1, first + 4)))


def test_one_micro_batch_spoils_its_step_and_no_other() -> None:
    spoilt = train(range(8), Poison([5]), LossGuard(), accumulate=2)
    assert_same(spoilt, train([0, 1, 2, 3, 6, 7], accumulate=2))


def test_endless_skipping_ends_with_a_user_error() -> None:
    guard = LossGuard(on_nan="skip", limit=3)
    with pytest.raises(UserError, match=r"at step 5 loss nan, and 4 of the last 6 steps were bad: lower the learning"):
        train(range(20), PoisonGradient(1, spoils_weight=True), guard)
    assert guard.skipped == 3


def test_stop_is_before_the_weights_are_touched() -> None:
    with pytest.raises(UserError, match=r"at step 3 loss nan: lower the learning rate"):
        train(range(6), Poison([3]), LossGuard(on_nan="stop"))


@pytest.mark.parametrize("action", ["ignore", "skip"])
def test_a_spike(action: Any, caplog: pytest.LogCaptureFixture) -> None:
    guard = LossGuard(on_spike=action, window=16)
    with caplog.at_level(logging.WARNING, "anlit"):
        spoilt = train(range(24), Poison([20], factor=30.0), guard)
    lines = [message for message in caplog.messages if message.startswith("step 20: loss")]
    assert len(lines) == guard.skipped == (action == "skip")
    if action == "skip":
        assert_same(spoilt, train([*range(20), 21, 22, 23]))
        assert "standard deviations above the mean of recent steps, the step was skipped" in lines[0]


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Seen(L.Callback):
        skipped: float

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.skipped = float(trainer.logged_metrics["guard/skipped"])

    seen = Seen()
    with caplog.at_level(logging.WARNING, "anlit"):
        train(range(6), Poison([2, 4]), LossGuard(), seen, log_every_n_steps=1)
    assert seen.skipped == 2
    assert [line for line in caplog.messages if line.startswith("step")] == [
        "step 2: loss nan, the step was skipped",
        "step 4: loss nan, the step was skipped",
    ]


def test_qk_clip_does_not_act_on_a_skipped_batch() -> None:
    settings = {"qk_clip": 1e-3, "backend": "eager"}
    spoilt = train(range(4), Poison([3]), LossGuard(), settings=settings)
    assert_same(spoilt, train(range(3), settings=settings))


def test_same_numbers_same_judgement() -> None:
    """Ranks pass reduced numbers, so all do the same; NaN on one rank is NaN in the mean."""
    ranks = [LossGuard(on_spike="skip", window=8) for _ in range(2)]
    numbers = [(3.0 + 0.1 * (i % 3), 1.0 + 0.1 * (i % 2)) for i in range(8)]
    numbers += [(4.9, 1.0), (3.0, 9.0), (math.nan, 1.0), (3.0, math.inf), (2.0, 0.1), (3.1, 1.1)]
    answers = [[guard.judge(*pair)[0] for pair in numbers] for guard in ranks]
    assert answers[0] == answers[1] == ["step"] * 8 + ["skip"] * 4 + ["step", "step"]


def test_no_spike_before_half_the_window_and_none_in_a_constant_loss() -> None:
    guard = LossGuard(on_spike="skip", window=8)
    assert [guard.judge(loss, 1.0)[0] for loss in (3.0, 3.0, 90.0, 3.0)] == ["step"] * 4
    still = LossGuard(on_spike="skip", window=8)
    assert [still.judge(loss, 1.0)[0] for loss in [3.0] * 8 + [3.0001, 3.1]] == ["step"] * 9 + ["skip"]


@pytest.mark.parametrize(
    ("algorithm", "precision", "named"),
    [("value", "32-true", "gradient_clip_algorithm to norm"), (None, "16-mixed", "bf16-mixed")],
)
def test_settings_that_a_guard_cannot_work_with(algorithm: str | None, precision: str, named: str) -> None:
    trainer: Any = SimpleNamespace(gradient_clip_algorithm=algorithm, precision=precision)
    with pytest.raises(UserError, match=named):
        LossGuard().on_train_start(trainer, tiny(GPT))


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(UserError, match="window=1"):
        LossGuard(window=1)
