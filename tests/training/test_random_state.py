"""Draws of a micro-batch: of the run's seed, its step, its place in the step and its rank, and of nothing else."""

import random
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from anlit.training.callbacks.random_state import RandomState


def test_every_micro_batch_of_every_rank_draws_its_own_and_again_the_same(monkeypatch) -> None:
    def draw(seed: str, step: int, micro_batch: int, rank: int) -> tuple[float, ...]:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        trainer = SimpleNamespace(global_step=step, global_rank=rank, accumulate_grad_batches=2)
        model = SimpleNamespace(device=torch.device("cpu"))
        RandomState().on_train_batch_start(cast(Any, trainer), model, None, micro_batch)
        return random.random(), np.random.rand(), torch.rand(()).item()

    keys = list(product("12", (0, 1), (0, 1), (0, 1)))
    draws = {key: draw(*key) for key in keys}
    assert {key: draw(*key) for key in keys[::-1]} == draws
    for numbers in zip(*draws.values(), strict=True):
        assert len(set(numbers)) == len(keys)


def test_the_generator_of_the_models_device_is_seeded_too(monkeypatch) -> None:
    """Dropout on a GPU draws from it. The GPU is pretended."""
    seeds: list[int] = []
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    trainer = SimpleNamespace(global_step=3, global_rank=0, accumulate_grad_batches=1)
    model = SimpleNamespace(device=torch.device("cuda", 0))

    RandomState().on_train_batch_start(cast(Any, trainer), model, None, 0)

    assert seeds == [torch.initial_seed()]
