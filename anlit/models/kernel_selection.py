"""When `backend: auto` selects in a run: at the first batch, on the first rank, for all layers and lengths."""

import logging
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anlit.attention.attention import example_query
from anlit.attention.backends import candidates, default_backend
from anlit.attention.documents import Documents
from anlit.attention.selection import (
    AttentionSpec,
    Selection,
    Selections,
    device_label,
    mechanism_name,
)
from anlit.attention.trial import Trial, own_copy, run_trials
from anlit.layers.linear import computing_dtype

FEWEST_BATCHES = 1000
"""Batches of a run from which on it repays a trial. A shorter one takes the default back ends."""

_log = logging.getLogger("anlit.attention")


def select_at_first_batch(module: Any) -> None:
    """Let the first forward pass of `module`, a LanguageModel in a Trainer, select the back ends, on the first rank for
    all. What is known for this device is kept."""

    def select(h: Tensor, documents: Documents) -> None:
        module.model.before_attention = None
        label, trials = device_label(h.device), trials_of(module, h, documents)
        made = {each.spec: Selection(each.spec, each.default) for each in trials}
        known = (
            module.selections.made
            if module.selections and module.selections.device == label
            else []
        )
        kept = {selection.spec: selection for selection in known if selection.spec in made}
        new = [each for each in trials if each.candidates and each.spec not in kept]
        made |= kept
        if module.trainer.is_global_zero and new:
            for selection in run_trials(new, h.device):
                _log.info(str(selection))
                made[selection.spec] = selection
        module.selections = module.trainer.strategy.broadcast(
            Selections(label, list(made.values()))
        )
        for block in module.model.blocks:
            block.attention.use_selections(module.selections)

    if any(block.attention.backend == "auto" for block in module.model.blocks):
        module.model.before_attention = select


def use_saved(decoder: Any, plain: Any, device: torch.device) -> Selections | None:
    """Let layers run on what a checkpoint's table `plain` names, if that was selected on a device like this one.
    Returns the table's selections, whatever device they are for; None without a table."""
    selections = Selections.from_plain(plain)
    if selections is not None and selections.device == device_label(device):
        for block in decoder.blocks:
            block.attention.use_selections(selections)
    return selections


def trials_of(module: Any, h: Tensor, documents: Documents) -> list[Trial]:
    """Every kind of attention in the run: each mechanism of the layers, at each length of the data's schedule.

    There are no candidates on a CPU, with dropout, and in a run that is too short. `h`, (B, T, d), is a batch's.
    """
    trainer, device, rows, length = module.trainer, h.device, *h.shape[:2]
    data = getattr(trainer, "datamodule", None)
    tokens = (getattr(data, "batch_size", None) or rows) * length
    lengths = sorted({*(getattr(data, "context_schedule", None) or {}).values()}) or [length]
    is_short = 0 < trainer.max_steps * trainer.accumulate_grad_batches < FEWEST_BATCHES
    mean = rows * length // max(1, len(documents.cu_seqlens) - 1) if documents.are_masked else None
    compiled, dtype = (
        device.type != "cpu" and module.runtime.compiles_on(device.type),
        computing_dtype(h),
    )
    blocks = {mechanism_name(block.attention.mechanism): block for block in module.model.blocks}
    trials = []
    for (name, block), length in product(blocks.items(), lengths):
        mechanism, dropout = block.attention.mechanism, block.attention.dropout
        sizes = (
            max(1, tokens // length),
            mechanism.n_heads,
            block.n_kv_heads,
            length,
            mechanism.d_head,
        )
        document = None if mean is None else min(mean, length)
        spec = AttentionSpec(name, *sizes, str(dtype).removeprefix("torch."), document, compiled)
        q = example_query(mechanism, length, dtype, device, requires_grad=True)
        default = default_backend(mechanism, device.type, q, dropout)
        tried = [] if dropout or is_short else candidates(mechanism, q, mean is not None)
        trials.append(
            Trial(spec, own_copy(mechanism), [] if tried == [default] else tried, default)
        )
    return trials
