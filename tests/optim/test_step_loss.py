"""Micro-batches that count different numbers of tokens train as the one batch that holds them all."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit.targets import IGNORED
from anlit.training.callbacks import LossGuard
from tests.data.blocks import collate
from tests.models.tiny import ARCHITECTURES, CONSTANT, SIZE, adamw, random_tokens, tiny

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
SEQUENCES, STEPS = 8, 3


class Logged(L.Callback):
    """train/loss and train/grad_norm of each optimizer step."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            logged = trainer.callback_metrics
            self.values.append((float(logged["train/loss"]), float(logged["train/grad_norm"])))


def blocks() -> list[torch.Tensor]:
    """Sequences of many documents, in which few targets count, among such of one."""
    tokens = random_tokens(SEQUENCES * STEPS, SIZE["context_length"] + 1, seed=3)
    tokens[tokens == 0] = 1
    tokens[::3, 1::2] = 0
    return list(tokens)


def train(architecture: Any, batch_size: int, score_first_token: bool, **trainer: Any) -> tuple[dict, Logged]:
    model = tiny(architecture, optimizer=adamw(lr=0.01), schedule=CONSTANT, z_loss=0.1)
    logged = Logged()
    collated = partial(collate, score_first_token=score_first_token)
    settings = {"accumulate_grad_batches": SEQUENCES // batch_size, "max_steps": STEPS, "callbacks": [logged]}
    settings |= {"accelerator": "cpu", "devices": 1, "precision": "64-true", "gradient_clip_val": 0.5, **QUIET}
    loader = DataLoader(blocks(), batch_size, collate_fn=collated)
    L.Trainer(**{**settings, **trainer}).fit(model, loader)
    return model.state_dict(), logged


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("score_first_token", [False, True])
def test_micro_batches_are_one_batch(architecture: Any, score_first_token: bool) -> None:
    whole, expected = train(architecture, SEQUENCES, score_first_token)
    for batch_size in (1, 4):
        weights, logged = train(architecture, batch_size, score_first_token)
        torch.testing.assert_close(torch.tensor(logged.values), torch.tensor(expected.values), rtol=1e-6, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-10, msg=name)


def test_the_counts_differ() -> None:
    counted = [int((collate([block], score_first_token=False).targets != IGNORED).sum()) for block in blocks()]
    assert min(counted) < 0.6 * max(counted)


@pytest.mark.parametrize("score_first_token", [False, True])
def test_an_epoch_that_ends_within_a_step_takes_the_mean_of_what_there_is(score_first_token: bool) -> None:
    """Micro-batches of 2, three to a step, eight in an epoch of which two are left for the last step."""
    architecture, settings = ARCHITECTURES[0], {"limit_train_batches": 2, "max_steps": 1}
    weights, _ = train(architecture, 2, score_first_token, accumulate_grad_batches=3, **settings)
    whole, _ = train(architecture, 4, score_first_token, accumulate_grad_batches=1, **settings)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-10, msg=name)


def test_the_guard_judges_the_loss_of_the_step() -> None:
    """Of the whole objective, z-loss included."""
    guards = [LossGuard(), LossGuard()]
    for guard, batch_size in zip(guards, (SEQUENCES, 1), strict=True):
        train(ARCHITECTURES[0], batch_size, False, callbacks=[guard])
    assert list(guards[0].losses) == pytest.approx(list(guards[1].losses), rel=1e-6)


@pytest.mark.parametrize("setting", [{"gradient_clip_val": None}, {"gradient_clip_algorithm": "value"}])
def test_without_a_norm_to_clip_to_gradients_are_only_measured(setting: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr("anlit.models.language_model.clip_grad_norm_", None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    _, logged = train(ARCHITECTURES[0], SEQUENCES, False, **setting)
    assert all(norm > 0.01 for _, norm in logged.values)
