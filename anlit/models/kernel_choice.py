"""When `backend: auto` chooses in a run: at the first batch, on the first rank, for all layers and lengths."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from anlit.attention.attention import computing_dtype
from anlit.attention.choice.choices import Choices, device_label
from anlit.attention.choice.choose import Wanted, choose
from anlit.attention.choice.inputs import own_copy
from anlit.attention.choice.kind import Kind, form_of, mean_document, name_of
from anlit.attention.documents import Documents


def choose_at_first_batch(module: Any) -> None:
    """Let the run's first forward pass choose the back ends; `module` is a LanguageModel in a Trainer."""

    def choose_now(h: Tensor, documents: Documents) -> None:
        module.model.before_attention = None
        _choose(module, h, documents)

    if blocks_on_auto(module.model):
        module.model.before_attention = choose_now


def blocks_on_auto(decoder: Any) -> list[Any]:
    return [block for block in decoder.blocks if block.attention.backend == "auto"]


def take_saved(decoder: Any, plain: Any, device: torch.device) -> Choices | None:
    """Let layers run on what a checkpoint names, if that was chosen on a device like this one.

    Args:
        decoder: The model.
        plain: The checkpoint's table, None if it has none.
        device: Where the model will be.

    Returns:
        The table's choices, whatever device they are for.
    """
    choices = Choices.from_plain(plain)
    if choices is not None and choices.device == device_label(device):
        _take(decoder, choices)
    return choices


def _take(decoder: Any, choices: Choices) -> None:
    for block in blocks_on_auto(decoder):
        block.attention.take(choices)


def _choose(module: Any, h: Tensor, documents: Documents) -> None:
    """All ranks take what the first one chooses, whatever they know themselves."""
    plain, trainer = None, module.trainer
    if trainer.is_global_zero:
        plain = choose(wanted(module, h, documents), h.device, module.choices).as_plain()
    module.choices = Choices.from_plain(trainer.strategy.broadcast(plain))
    assert module.choices is not None
    _take(module.model, module.choices)


def wanted(module: Any, h: Tensor, documents: Documents) -> list[Wanted]:
    """Every kind of attention in the run: each mechanism of the layers, at each length of the data's schedule.

    Args:
        module: A LanguageModel in a Trainer.
        h: (B, T, d), the hidden states of a batch, in training or validation.
        documents: Of that batch.
    """
    data, trainer = getattr(module.trainer, "datamodule", None), module.trainer
    schedule = getattr(data, "context_schedule", None) or {}
    tokens = (getattr(data, "batch_size", None) or h.shape[0]) * h.shape[1]
    lengths = sorted(set(schedule.values())) or [h.shape[1]]
    steps = trainer.max_steps if trainer.max_steps > 0 else float("inf")
    blocks = {form_of(block.attention.mechanism): block for block in blocks_on_auto(module.model)}
    numbers = Counter(form_of(block.attention.mechanism) for block in blocks_on_auto(module.model))
    mean = mean_document(documents, h.shape[0])
    return [
        Wanted(
            Kind(
                form,
                max(1, tokens // length),
                block.attention.mechanism.n_heads,
                block.n_kv_heads,
                length,
                block.attention.mechanism.d_head,
                name_of(computing_dtype(h)),
                None if mean is None else min(mean, length),
                block.attention.dropout,
                h.device.type != "cpu" and module.runtime.compiles_on(h.device.type),
            ),
            own_copy(block.attention.mechanism),
            numbers[form],
            steps * trainer.accumulate_grad_batches * numbers[form] / len(lengths),
        )
        for form, block in blocks.items()
        for length in lengths
    ]
