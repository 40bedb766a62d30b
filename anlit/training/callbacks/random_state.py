"""Random numbers of a step that do not depend on what was drawn before, so that a resumed run draws the same ones."""

import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch


class RandomState(L.Callback):
    """Seeds Python's, NumPy's and torch's generators before each micro-batch.

    The seed is of the run's seed, the optimizer step, the micro-batch in it and the rank, so a checkpoint needs no
    state. Without `seed_everything` nothing is seeded.
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (run_seed := os.environ.get("PL_GLOBAL_SEED")) is not None:  # set by seed_everything
            key = (
                int(run_seed),
                trainer.global_step,
                batch_idx % trainer.accumulate_grad_batches,
                trainer.global_rank,
            )
            seed = int(np.random.SeedSequence(key).generate_state(1)[0])
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            # torch.manual_seed seeds every kind of device, and notes a traceback for those that are not there.
            if (device := pl_module.device.type) != "cpu":
                torch.get_device_module(device).manual_seed(seed)
