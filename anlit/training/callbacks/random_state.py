"""The state of the random number generators in every checkpoint, so that a resumed run draws what would have come."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch


class RandomState(L.Callback):
    """Saves Python's, NumPy's, torch's and CUDA's generator states of the saving rank, and restores them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": random.getstate(),
            "numpy": (algorithm, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, cached),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore as late as possible: opening the loaders draws numbers that the saved state is already past."""
        if (state := self._loaded) is None:
            return
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        algorithm, keys, *rest = state["numpy"]
        np.random.set_state((algorithm, keys.numpy(), *rest))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        self._loaded = None
