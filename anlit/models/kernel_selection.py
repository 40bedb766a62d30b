"""When `backend: auto` selects in a run: at the first batch, on the first rank, for all layers and lengths."""

import logging
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
    """Let the run's first forward pass select the back ends; `module` is a LanguageModel in a Trainer."""

    def select_now(h: Tensor, documents: Documents) -> None:
        module.model.before_attention = None
        _select(module, h, documents)

    if blocks_on_auto(module.model):
        module.model.before_attention = select_now


def blocks_on_auto(decoder: Any) -> list[Any]:
    return [block for block in decoder.blocks if block.attention.backend == "auto"]


def use_saved(decoder: Any, plain: Any, device: torch.device) -> Selections | None:
    """Let layers run on what a checkpoint names, if that was selected on a device like this one.

    Args:
        decoder: The model.
        plain: The checkpoint's table, None if it has none.
        device: Where the model will be.

    Returns:
        The table's selections, whatever device they are for.
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
    trainer, trials = module.trainer, trials_of(module, h, documents)
    label, known = device_label(h.device), module.selections
    kept = {each.spec: known.of(each.spec) for each in trials} if known is not None and known.device == label else {}
    kept = {spec: selection for spec, selection in kept.items() if selection and selection.backend in BACKENDS}
    new = [each for each in trials if each.candidates and each.spec not in kept]
    n_trials = trainer.strategy.broadcast(len(new))  # the other ranks wait for what follows from here on
    _log.debug(f"{n_trials} kinds of attention are tried on rank 0, for at most {trial.TIME_LIMIT_S:g} s")
    plain = None
    if trainer.is_global_zero:
        tried = {selection.spec: selection for selection in trial.run_trials(new, h.device)} if new else {}
        for selection in tried.values():
            _log.info(str(selection))
        defaults = {each.spec: Selection(each.spec, each.default) for each in trials}
        plain = Selections(label, tuple({**defaults, **kept, **tried}.values())).as_plain()  # type: ignore[arg-type]
    module.selections = Selections.from_plain(trainer.strategy.broadcast(plain))
    assert module.selections is not None
    _use(module.model, module.selections)


def trials_of(module: Any, h: Tensor, documents: Documents) -> list[Trial]:
    """Every kind of attention in the run: each mechanism of the layers, at each length of the data's schedule.

    There are no candidates on a CPU, with dropout, and in a run that is too short to repay a trial.

    Args:
        module: A LanguageModel in a Trainer.
        h: (B, T, d), the hidden states of a batch, in training or validation.
        documents: The documents of that batch.
    """
    data, trainer = getattr(module.trainer, "datamodule", None), module.trainer
    schedule = getattr(data, "context_schedule", None) or {}
    tokens = (getattr(data, "batch_size", None) or h.shape[0]) * h.shape[1]
    lengths = sorted(set(schedule.values())) or [h.shape[1]]
    is_short = 0 < trainer.max_steps * trainer.accumulate_grad_batches < FEWEST_BATCHES
    mean = mean_document(documents, h.shape[0])
    trials = []
    blocks = {mechanism_name(block.attention.mechanism): block for block in blocks_on_auto(module.model)}
    for form, block in blocks.items():
        mechanism, dropout = block.attention.mechanism, block.attention.dropout
        for length in lengths:
            document = None if mean is None else min(mean, length)
            sizes = (max(1, tokens // length), mechanism.n_heads, block.n_kv_heads, length, mechanism.d_head)
            compiled = h.device.type != "cpu" and module.runtime.compiles_on(h.device.type)
            dtype = computing_dtype(h)
            spec = AttentionSpec(form, *sizes, name_of(dtype), document, compiled)
            q = example_query(mechanism, length, dtype, h.device, requires_grad=True)
            tried = {} if dropout or is_short else candidates(mechanism, q, spec.is_packed)
            default = default_backend(mechanism, h.device.type, q, dropout)
            trials.append(Trial(spec, mechanism, {} if [*tried] == [default] else tried, default))
    return trials
