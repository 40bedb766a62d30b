"""When `backend: auto` selects in a run: at the first batch, on the first rank, for all layers and lengths."""

import logging
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anlit.attention import trial
from anlit.attention.attention import computing_dtype, example_query
from anlit.attention.backends import BACKENDS, candidates, default_backend
from anlit.attention.documents import Documents
from anlit.attention.selection import (
    AttentionSpec,
    Selection,
    Selections,
    device_label,
    mean_document,
    mechanism_name,
    name_of,
)
from anlit.attention.trial import Trial

FEWEST_BATCHES = 1000
"""Batches of a run from which on it repays a trial. A shorter one takes the default back ends."""

_log = logging.getLogger("anlit.attention")


def select_at_first_batch(module: Any) -> None:
    """Let the first forward pass of `module`, a LanguageModel in a Trainer, select the back ends."""

    def select_now(h: Tensor, documents: Documents) -> None:
        module.model.before_attention = None
        _select(module, h, documents)

    if blocks_on_auto(module.model):
        module.model.before_attention = select_now


def blocks_on_auto(decoder: Any) -> list[Any]:
    return [block for block in decoder.blocks if block.attention.backend == "auto"]


def use_saved(decoder: Any, plain: Any, device: torch.device) -> Selections | None:
    """Let layers run on what a checkpoint's table `plain` names, if that was selected on a device like this one.

    Returns the table's selections, whatever device they are for; None without a table.
    """
    selections = Selections.from_plain(plain)
    if selections is not None and selections.device == device_label(device):
        _use(decoder, selections)
    return selections


def _use(decoder: Any, selections: Selections) -> None:
    for block in blocks_on_auto(decoder):
        block.attention.use_selections(selections)


def _select(module: Any, h: Tensor, documents: Documents) -> None:
    """All ranks take what the first one selects, and are told before it begins, so that none waits long."""
    trainer, trials, label = module.trainer, trials_of(module, h, documents), device_label(h.device)
    known = module.selections if module.selections and module.selections.device == label else Selections(label, ())
    kept = {each.spec: made for each in trials if (made := known.of(each.spec)) and made.backend in BACKENDS}
    new = [each for each in trials if each.candidates and each.spec not in kept]
    n_trials = trainer.strategy.broadcast(len(new))  # the other ranks wait for what follows from here on
    _log.debug(f"{n_trials} kinds of attention are tried on rank 0, for at most {trial.TIME_LIMIT_S:g} s")
    made = {each.spec: Selection(each.spec, each.default) for each in trials} | kept
    if trainer.is_global_zero and new:
        for selection in trial.run_trials(new, h.device):
            _log.info(str(selection))
            made[selection.spec] = selection
    module.selections = trainer.strategy.broadcast(Selections(label, tuple(made.values())))
    _use(module.model, module.selections)


def trials_of(module: Any, h: Tensor, documents: Documents) -> list[Trial]:
    """Every kind of attention in the run: each mechanism of the layers, at each length of the data's schedule.

    There are no candidates on a CPU, with dropout, and in a run that is too short to repay a trial. `h`, (B, T, d), and
    `documents` are those of a batch in training or validation.
    """
    trainer, device = module.trainer, h.device
    data = getattr(trainer, "datamodule", None)
    tokens = (getattr(data, "batch_size", None) or h.shape[0]) * h.shape[1]
    lengths = sorted({*(getattr(data, "context_schedule", None) or {}).values()}) or [h.shape[1]]
    is_short = 0 < trainer.max_steps * trainer.accumulate_grad_batches < FEWEST_BATCHES
    mean, dtype = mean_document(documents, h.shape[0]), computing_dtype(h)
    compiled = device.type != "cpu" and module.runtime.compiles_on(device.type)
    trials = []
    blocks = {mechanism_name(block.attention.mechanism): block for block in blocks_on_auto(module.model)}
    for (form, block), length in product(blocks.items(), lengths):
        mechanism, dropout = block.attention.mechanism, block.attention.dropout
        sizes = (max(1, tokens // length), mechanism.n_heads, block.n_kv_heads, length, mechanism.d_head)
        document = None if mean is None else min(mean, length)
        spec = AttentionSpec(form, *sizes, name_of(dtype), document, compiled)
        q = example_query(mechanism, length, dtype, device, requires_grad=True)
        tried = {} if dropout or is_short else candidates(mechanism, q, spec.is_packed)
        default = default_backend(mechanism, device.type, q, dropout)
        trials.append(Trial(spec, mechanism, {} if [*tried] == [default] else tried, default))
    return trials
