"""A training step of our models as `anlit fit` runs it, and a step of other libraries' models.

Our step is Lightning's own optimization loop, called batch by batch. A real Trainer has the model,
the precision, the optimizer and the clipping. So the hooks, their order and the restoration of
norms are the same as in a run. The loader, the callbacks, logging and the loop over batches are
left out. A peer's step has AdamW (fused), clipping to 1.0 and bfloat16 by autocast.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anlit import AdamW, Constant, Plain
from anlit.benchmarks.options import Size
from anlit.data.batch import Batch, batch_from_blocks
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models.flops import flops_per_token
from anlit.nn.models.runtime import Runtime
from anlit.training.language_model import LanguageModel
from anlit.training.lightning_internals import configure_model
from anlit.training.models import GPT, NGPT, AnGPT

MODELS: dict[str, Any] = {"GPT": GPT, "nGPT": NGPT, "anGPT": AnGPT}
MEAN_PACKED_DOCUMENT = 1 / 4
"""Mean length of a packed document as a share of T."""
N_BATCHES = 8
"""Batches that a step takes in turns."""
RATE = 1e-4
"""The learning rate until `Step.stop_learning`."""
PEER_COMPILATIONS = ("no", "whole")
Network = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A peer's model, and its function from tokens (B, T) to logits (B, T, V)."""


class Step(NamedTuple):
    """A model with its optimizer and its batches.

    Attributes:
        model: The model, on its device.
        optimizer: Its optimizer.
        train: Takes a step on the next batch and returns the loss without waiting for the device.
        flops_per_token: FLOPs of a training step per token; see `anlit.nn.models.flops`.
        stop_learning: Sets the learning rate to 0, see `stop_learning`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], Tensor]
    flops_per_token: float
    stop_learning: Callable[[], None]


def our_step(
    architecture: str,
    size: Size,
    device: torch.device,
    runtime: Runtime = Runtime(compile=False),
    mechanism: Mechanism | None = None,
    documents: bool = False,
    group: int = 1,
    kernel: str = "auto",
) -> Step:
    """Return the step of our model.

    Args:
        architecture: A key of `MODELS`.
        size: The shapes of model and batch.
        device: The device of the model and its batches.
        runtime: Compilation and float8.
        mechanism: The attention mechanism, by default `Plain()`.
        documents: Whether to pack documents into the batch and mask them.
        group: Query heads that share a key head.
        kernel: The attention kernel.
    """
    torch.manual_seed(0)
    with silent_lightning():
        model: LanguageModel = MODELS[architecture](
            vocab_size=size.vocab_size,
            context_length=size.length,
            n_layers=size.n_layers,
            n_heads=size.n_heads,
            n_kv_heads=size.n_heads // group,
            d_model=size.d_model,
            attention=mechanism or Plain(),
            document_masking=documents,
            kernel=kernel,
            runtime=runtime,
            optimizer=lambda groups: AdamW(groups, lr=RATE),
            schedule=Constant(),
        )
    precision = "bf16-mixed" if size.dtype == "bfloat16" else "32-true"
    trainer = prepare_trainer(model, device, precision)
    batches = random_batches(size.vocab_size, size.shape, documents, device)
    positions = torch.cat([batch.positions for batch in batches]) if documents else None
    flops = flops_per_token(model.model, size.length, positions)
    endless_batches = cycle(batches)

    def train() -> Tensor:
        return take_step(trainer, next(endless_batches))

    optimizer = trainer.optimizers[0]
    return Step(model, optimizer, train, flops, partial(stop_learning, trainer))


def stop_learning(trainer: L.Trainer) -> None:
    """Set the learning rate to 0. The steps remain the same work.

    A model that learned would know its batches by heart, or diverge to NaN. A GPU needs less power
    for vanishing gradients and for NaN, and keeps a higher clock.
    """
    for optimizer in trainer.optimizers:
        set_rate_to_zero(optimizer)
    for schedule in trainer.lr_scheduler_configs:
        scheduler: Any = schedule.scheduler
        scheduler.base_lrs = [0.0] * len(scheduler.base_lrs)


def set_rate_to_zero(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def random_batches(
    vocab_size: int,
    shape: tuple[int, int],
    documents: bool,
    device: torch.device,
    n_batches: int = N_BATCHES,
) -> list[Batch]:
    """Return batches of random tokens, whose frequencies fall as 1/rank, as those of words do.

    Args:
        vocab_size: The last of these tokens ends a document.
        shape: Sequences of a batch, and tokens of a sequence.
        documents: Whether a row has several documents, not a single one.
    """
    end = vocab_size - 1
    rows, length = shape
    shape_of_blocks = (n_batches, rows, length + 1)
    frequencies = 1 / np.arange(1, end + 1)
    shares = frequencies / frequencies.sum()
    blocks = np.random.default_rng(0).choice(end, shape_of_blocks, p=shares)
    if documents:
        end_share = 1 / (MEAN_PACKED_DOCUMENT * length)
        blocks[np.random.default_rng(1).random(shape_of_blocks) < end_share] = end
    return [move_data_to_device(batch_from_blocks(block, end), device) for block in blocks]


def take_step(trainer: L.Trainer, batch: Batch, accumulate: int = 1) -> Tensor:
    """Take an optimizer step and return its loss without waiting for the device.

    Forward and backward run `accumulate` times, then clipping, optimizer, norms and schedule. The
    weights change as in a step on the last micro-batch alone.
    """
    number = trainer.global_step
    for _ in range(accumulate - 1):
        loss: Any = trainer.strategy.training_step(batch, number)
        trainer.strategy.backward(loss, None)
    arguments = OrderedDict(batch=batch, batch_idx=number)
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    loss = optimization.run(trainer.optimizers[0], number, arguments)["loss"]
    for schedule in trainer.lr_scheduler_configs:
        schedule.scheduler.step()  # type: ignore[call-arg]
    return loss.detach()


@contextmanager
def silent_lightning() -> Iterator[None]:
    """Hide Lightning's lines about devices and ranks, and its warnings about hyperparameters."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def prepare_trainer(
    model: LanguageModel, device: torch.device, precision: Any, clip: float | None = 1.0
) -> L.Trainer:
    """Return a Trainer that has prepared the model for training and does not start it.

    Args:
        model: The model, on any device.
        device: The device to train on.
        precision: One of Lightning's precisions.
        clip: The largest norm of the gradient; None does not clip.
    """
    is_gpu = device.type == "cuda"
    with silent_lightning():
        trainer = L.Trainer(
            accelerator="gpu" if is_gpu else "cpu",
            devices=[device.index or 0] if is_gpu else 1,
            precision=precision,
            max_steps=1_000_000,
            gradient_clip_val=clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Logging works only inside a Trainer's loop.
        model.log = model.log_dict = _log_nothing  # type: ignore[method-assign, assignment]
        trainer.strategy.connect(model)
        model.trainer = trainer
        trainer.state.fn = TrainerFn.FITTING
        trainer.training = True
        trainer.strategy.setup_environment()
        configure_model(trainer, model)
        trainer.strategy.setup(trainer)
    model.train()
    return trainer


def _log_nothing(*arguments: Any, **options: Any) -> None:
    pass


def litgpt(size: Size) -> Network:
    """Return litgpt's GPT as a Qwen3: RMSNorm, QK-norm, RoPE, SwiGLU, untied head, no biases."""
    from litgpt import GPT, Config

    config = Config(
        name="qwen3",
        block_size=size.length,
        n_layer=size.n_layers,
        n_embd=size.d_model,
        n_head=size.n_heads,
        vocab_size=size.vocab_size,
        padded_vocab_size=size.vocab_size,
        intermediate_size=4 * size.d_model,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        bias=False,
        lm_head_bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
        norm_qk=True,
    )
    model = GPT(config)
    model.apply(model._init_weights)
    return model, model


def transformers(size: Size) -> Network:
    """Return transformers' Qwen3 with ungrouped heads and scaled_dot_product_attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    untyped_config: Any = Qwen3Config
    config = untyped_config(
        vocab_size=size.vocab_size,
        hidden_size=size.d_model,
        intermediate_size=4 * size.d_model,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_heads,
        head_dim=size.d_model // size.n_heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=False,
        attention_bias=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).float()
    return model, lambda tokens: model(input_ids=tokens).logits


PEERS: dict[str, Callable[[Size], Network]] = {"litgpt": litgpt, "transformers": transformers}
"""Makers of other libraries' models, by the name of the package."""


def peer_step(peer: str, size: Size, device: torch.device, compiled: str) -> Step:
    """Return a peer's training step.

    Autocast keeps its cache of casts, as in Fabric with bf16-mixed (litgpt's default) and in
    transformers' Trainer. Lightning's Trainer, which our step has, switches the cache off. It saves
    no work on either side: a step casts each weight once.

    Args:
        peer: A key of `PEERS`.
        size: The shapes of model and batch.
        device: The device of the model and its batches.
        compiled: `whole` compiles the network with the loss, `no` compiles nothing.
    """
    torch.manual_seed(0)
    model, logits = PEERS[peer](size)
    model.to(device).train()
    batches = cycle(random_batches(size.vocab_size, size.shape, False, device))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1, fused=True
    )

    def compute_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits(tokens).flatten(0, 1).float(), targets.flatten())

    if compiled == "whole":
        compute_loss = torch.compile(compute_loss, dynamic=False)

    def train() -> Tensor:
        batch = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "bfloat16"):
            loss = compute_loss(batch.tokens, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    flops = peer_flops_per_token(model, size)
    return Step(model, optimizer, train, flops, partial(set_rate_to_zero, optimizer))


def peer_flops_per_token(model: nn.Module, size: Size) -> float:
    """Count as `anlit.nn.models.flops`: 6 per linear weight, 12·d per layer and visible key."""
    n_weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            n_weights += module.weight.numel()
    return 6.0 * n_weights + 12.0 * size.d_model * (size.length + 1) / 2 * size.n_layers
