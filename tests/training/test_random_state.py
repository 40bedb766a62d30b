"""A micro-batch's draws depend only on the run's seed, the step, the micro-batch and the rank."""

import random
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anlit.training.callbacks.random_state import RandomState


class MicroBatch(NamedTuple):
    """A micro-batch of a run; a step has two."""

    seed: str
    step: int
    number: int
    rank: int


def seed_generators(
    monkeypatch: pytest.MonkeyPatch, micro_batch: MicroBatch, device: str = "cpu"
) -> None:
    """Call the hook as a Trainer does at this micro-batch."""
    monkeypatch.setenv("PL_GLOBAL_SEED", micro_batch.seed)
    trainer: Any = SimpleNamespace(
        global_step=micro_batch.step,
        global_rank=micro_batch.rank,
        accumulate_grad_batches=2,
    )
    model: Any = SimpleNamespace(device=torch.device(device))
    RandomState().on_train_batch_start(trainer, model, None, micro_batch.number)


MICRO_BATCHES = [MicroBatch(*numbers) for numbers in product("12", (0, 1), (0, 1), (0, 1))]


def test_micro_batches_of_all_ranks_draw_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = []
    for micro_batch in MICRO_BATCHES:
        seed_generators(monkeypatch, micro_batch)
        draws.append(draw())

    for numbers in zip(*draws, strict=True):
        assert len(set(numbers)) == len(MICRO_BATCHES)


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_a_micro_batch_draws_the_same_numbers_again(
    monkeypatch: pytest.MonkeyPatch, micro_batch: MicroBatch
) -> None:
    seed_generators(monkeypatch, micro_batch)
    numbers = draw()

    seed_generators(monkeypatch, micro_batch)

    assert draw() == numbers


def draw() -> tuple[float, float, float]:
    """A number of each generator."""
    number = random.random()
    number_of_numpy = np.random.rand()
    number_of_torch = torch.rand(()).item()
    return number, number_of_numpy, number_of_torch


def test_the_generator_of_the_models_device_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from it. The GPU is simulated."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    micro_batch = MicroBatch("1", step=3, number=0, rank=0)

    seed_generators(monkeypatch, micro_batch, "cuda:0")

    assert seeds == [torch.initial_seed()]
