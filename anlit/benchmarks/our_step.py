"""One training step of our models as `anlit fit` runs it: Lightning's own optimization loop, called batch by batch.

A real Trainer holds the model, the precision, the optimizer and the clipping. So the model's hooks, their order and the
restoration of norms are those of a run. The loader, the callbacks, logging and the loop over batches are left out.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from anlit import Plain
from anlit.attention.mechanism import Mechanism
from anlit.benchmarks.options import Size
from anlit.data.batch import Batch, batch_from_blocks
from anlit.lightning_internals import configure_model
from anlit.models import GPT, NGPT, AnGPT
from anlit.models.flops import flops_per_token
from anlit.models.kernel_selection import select_at_first_batch
from anlit.models.language_model import LanguageModel
from anlit.models.runtime import Runtime

MODELS: dict[str, Any] = {"GPT": GPT, "nGPT": NGPT, "anGPT": AnGPT}
MEAN_DOCUMENT = 1 / 4
"""Mean length of a packed document, as a share of T."""
MANY_STEPS = 1_000_000


class Step(NamedTuple):
    """A model with its optimizer and one batch; `train` takes a step and returns the loss without waiting for it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], Tensor]
    flops_per_token: float
    """Of a training step; see `anlit.models.flops`."""


def our_step(
    architecture: str,
    size: Size,
    device: torch.device,
    runtime: Runtime = Runtime(compile=False),
    mechanism: Mechanism | None = None,
    documents: bool = False,
    group: int = 1,
    backend: str = "auto",
) -> Step:
    """The step of a model of `MODELS`.

    Args:
        documents: Pack documents into the batch and mask them; else each row is one document.
        group: Query heads that share a key head.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        model: LanguageModel = MODELS[architecture](
            vocab_size=size.vocab_size, context_length=size.length, n_layers=size.n_layers, n_heads=size.n_heads,
            n_kv_heads=size.n_heads // group, d_model=size.d_model, attention=mechanism or Plain(),
            document_masking=documents, backend=backend, runtime=runtime,
        )  # fmt: skip
    trainer = trainer_of(model, device, size.dtype)
    train = partial(take_step, trainer, batch_of(size, documents, device))
    return Step(model, trainer.optimizers[0], train, flops_per_token(model.model, size.length))


def batch_of(size: Size, documents: bool, device: torch.device) -> Batch:
    """A batch of random tokens, each row one document or, with `documents`, several."""
    end = size.vocab_size - 1
    blocks = np.random.default_rng(0).integers(0, end, (size.batch, size.length + 1))
    if documents:
        blocks[np.random.default_rng(1).random(blocks.shape) < 1 / (MEAN_DOCUMENT * size.length)] = end
    batch = batch_from_blocks(blocks, end)
    return Batch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))  # type: ignore[arg-type]


def take_step(trainer: L.Trainer, batch: Batch) -> Tensor:
    """Forward, backward, clipping, optimizer, norms, schedule. Returns the loss, without waiting for the device."""
    number = trainer.global_step
    arguments = OrderedDict(batch=batch, batch_idx=number)
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    loss = optimization.run(trainer.optimizers[0], number, arguments)["loss"]
    for schedule in trainer.lr_scheduler_configs:
        schedule.scheduler.step()  # type: ignore[call-arg]
    return loss.detach()


def trainer_of(model: LanguageModel, device: torch.device, dtype: str) -> L.Trainer:
    """A Trainer that has prepared the model for training on `device` in float32 or bfloat16; it does not start it."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision="bf16-mixed" if dtype == "bfloat16" else "32-true",
            max_steps=MANY_STEPS, gradient_clip_val=1.0,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    logging.disable(logging.NOTSET)
    # Both work only inside a Trainer's loop.
    model.log = model.log_dict = lambda *given, **more: None  # type: ignore[method-assign, assignment]
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    trainer.strategy.setup_environment()
    configure_model(trainer, model)
    trainer.strategy.setup(trainer)
    select_at_first_batch(model)
    model.train()
    return trainer
