"""A micro-batch's draws depend only on the run's seed, the step, the micro-batch and the rank."""

import random
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from anlit.training.callbacks.random_state import RandomState


def seed_micro_batch(step: int, micro_batch: int, rank: int, device: str = "cpu") -> None:
    """Call the hook as a Trainer does at this micro-batch; a step has two."""
    trainer = SimpleNamespace(global_step=step, global_rank=rank, accumulate_grad_batches=2)
    model = SimpleNamespace(device=torch.device(device))
    RandomState().on_train_batch_start(cast(Any, trainer), model, None, micro_batch)


def test_every_micro_batch_of_every_rank_draws_different_numbers_and_again_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = ("1", "2")
    keys = list(product(seeds, (0, 1), (0, 1), (0, 1)))

    draws = {}
    for seed, step, micro_batch, rank in [*keys, *reversed(keys)]:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        seed_micro_batch(step, micro_batch, rank)
        numbers = draw()
        assert draws.setdefault((seed, step, micro_batch, rank), numbers) == numbers

    for numbers in zip(*draws.values(), strict=True):
        assert len(set(numbers)) == len(keys)


def draw() -> tuple[float, float, float]:
    """A number of each generator."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_the_generator_of_the_models_device_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from it. The GPU is simulated."""
    seeds: list[int] = []
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)

    seed_micro_batch(step=3, micro_batch=0, rank=0, device="cuda:0")

    assert seeds == [torch.initial_seed()]
