"""The state of the random number generators in every checkpoint, so that a resumed run draws the same numbers."""

import io
import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import distributed


class RandomState(L.Callback):
    """Saves Python's, NumPy's, torch's and CUDA's generator states of every rank, and restores them.

    If there are more ranks than saved states, the additional ranks reuse the states from the first one on.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks; all ranks must call this."""
        if _world_size() == 1:
            return {"ranks": [_state()]}
        written = io.BytesIO()  # all_gather_object alone would not restore NumPy's unsigned numbers as tensors
        torch.save(_state(), written)
        ranks: list[Any] = [None] * _world_size()
        distributed.all_gather_object(ranks, written.getvalue())
        return {"ranks": [torch.load(io.BytesIO(state), weights_only=True) for state in ranks]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["ranks"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore as late as possible, because opening the data loaders draws random numbers."""
        if self._loaded:
            _restore(self._loaded[trainer.global_rank % len(self._loaded)])
            self._loaded = []


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _state() -> dict[str, Any]:
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu())
