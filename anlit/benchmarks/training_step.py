"""One training step of our models as `anlit fit` runs it, and the same step with the models of other libraries.

Ours is Lightning's own optimization loop, called batch by batch. A real Trainer holds the model, the precision, the
optimizer and the clipping. So the model's hooks, their order and the restoration of norms are those of a run. The
loader, the callbacks, logging and the loop over batches are left out. A peer's step has AdamW (fused), clipping to 1.0
and bfloat16 by autocast.
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
from torch.nn.functional import cross_entropy

from anlit import Plain
from anlit.benchmarks.options import Size
from anlit.data.batch import Batch, batch_from_blocks
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models.flops import flops_per_token
from anlit.nn.models.runtime import Runtime
from anlit.training.language_model import LanguageModel
from anlit.training.lightning_internals import configure_model
from anlit.training.models import GPT, NGPT, AnGPT

MODELS: dict[str, Any] = {"GPT": GPT, "nGPT": NGPT, "anGPT": AnGPT}
MEAN_DOCUMENT = 1 / 4
"""Mean length of a packed document, as a share of T."""
COMPILED = ("no", "whole")
Network = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A peer's model, and its function from tokens (B, T) to logits (B, T, V)."""


class Step(NamedTuple):
    """A model with its optimizer and one batch; `train` takes a step and returns the loss without waiting for it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], Tensor]
    flops_per_token: float
    """Of a training step; see `anlit.nn.models.flops`."""


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
    """The step of a model of `MODELS`, which packs and masks `documents`; `group` query heads share a key head."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        model: LanguageModel = MODELS[architecture](
            vocab_size=size.vocab_size, context_length=size.length, n_layers=size.n_layers, n_heads=size.n_heads,
            n_kv_heads=size.n_heads // group, d_model=size.d_model, attention=mechanism or Plain(),
            document_masking=documents, kernel=kernel, runtime=runtime,
        )  # fmt: skip
    trainer = trainer_of(model, device, "bf16-mixed" if size.dtype == "bfloat16" else "32-true")
    train = partial(take_step, trainer, batch_of(size, documents, device))
    return Step(model, trainer.optimizers[0], train, flops_per_token(model.model, size.length))


def batch_of(size: Size, documents: bool, device: torch.device) -> Batch:
    """A batch of random tokens, each row one document or, with `documents`, several."""
    end = size.vocab_size - 1
    blocks = np.random.default_rng(0).integers(0, end, (size.batch, size.length + 1))
    if documents:
        blocks[
            np.random.default_rng(1).random(blocks.shape) < 1 / (MEAN_DOCUMENT * size.length)
        ] = end
    batch = batch_from_blocks(blocks, end)
    return Batch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))  # type: ignore[arg-type]


def take_step(trainer: L.Trainer, batch: Batch, accumulate: int = 1) -> Tensor:
    """Forward and backward, `accumulate` times, then clipping, optimizer, norms, schedule. Returns the loss, without
    waiting for the device. The weights are those of a step on the last micro-batch alone.
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


def trainer_of(
    model: LanguageModel, device: torch.device, precision: Any, clip: float | None = 1.0
) -> L.Trainer:
    """A Trainer that has prepared the model for training on `device` in a precision of Lightning's; it does not start
    it."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision=precision, max_steps=1_000_000, gradient_clip_val=clip,
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
    model.train()
    return trainer


def litgpt(size: Size) -> Network:
    """litgpt's GPT as a Qwen3: RMSNorm, QK-norm, RoPE on the whole head, SwiGLU, untied head, no biases."""
    from litgpt import GPT, Config

    config = Config(
        name="qwen3", block_size=size.length, n_layer=size.n_layers, n_embd=size.d_model, n_head=size.n_heads,
        vocab_size=size.vocab_size, padded_vocab_size=size.vocab_size, intermediate_size=4 * size.d_model,
        mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm", bias=False, lm_head_bias=False, parallel_residual=False,
        rotary_percentage=1.0, norm_qk=True,
    )  # fmt: skip
    model = GPT(config)
    model.apply(model._init_weights)
    return model, model


def transformers(size: Size) -> Network:
    """Qwen3 of transformers with ungrouped heads and attention by scaled_dot_product_attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make: Any = Qwen3Config
    config = make(
        vocab_size=size.vocab_size, hidden_size=size.d_model, intermediate_size=4 * size.d_model,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, num_key_value_heads=size.n_heads,
        head_dim=size.d_model // size.n_heads, max_position_embeddings=size.length, tie_word_embeddings=False,
        attention_bias=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    return model, lambda tokens: model(input_ids=tokens).logits


PEERS: dict[str, Callable[[Size], Network]] = {"litgpt": litgpt, "transformers": transformers}
"""By the name of their package."""


def peer_step(peer: str, size: Size, device: torch.device, compiled: str) -> Step:
    """A peer's training step; `compiled`: `whole` compiles the network with the loss, `no` nothing."""
    torch.manual_seed(0)
    model, logits = PEERS[peer](size)
    model.to(device).train()
    batch = batch_of(size, False, device)
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=betas, eps=1e-9, weight_decay=0.1, fused=True
    )

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits(tokens).flatten(0, 1).float(), targets.flatten())

    compute = torch.compile(loss_of, dynamic=False) if compiled == "whole" else loss_of

    def train() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "bfloat16"):
            loss = compute(batch.tokens, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # as in anlit.nn.models.flops: 6 per weight of a linear map, 12·d per layer and visible key
    linear = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    flops = 6.0 * linear + 12.0 * size.d_model * (size.length + 1) / 2 * size.n_layers
    return Step(model, optimizer, train, flops)
