"""Random numbers of a step do not depend on earlier draws. A resumed run draws the same."""

import os
import random
from typing import Any

import lightning as L
import numpy as np
import torch


class RandomState(L.Callback):
    """Seeds Python's, NumPy's and torch's generators before each micro-batch.

    The seed is a function of run seed, optimizer step, micro-batch and rank. So a checkpoint needs
    no state. Without `seed_everything` nothing is seeded.
    """

    changes_learning = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        run_seed = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
        if run_seed is None:
            return
        micro_batch = batch_idx % trainer.accumulate_grad_batches
        key = (int(run_seed), trainer.global_step, micro_batch, trainer.global_rank)
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        # torch.manual_seed would seed every kind of device, and keep a traceback for missing kinds.
        torch.default_generator.manual_seed(seed)
        device_type = pl_module.device.type
        if device_type != "cpu":
            torch.get_device_module(device_type).manual_seed(seed)
