"""The sizing table: four sizes of two architectures on 1, 4, 8 and 64 GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from anlit.models import GPT, AnGPT
from anlit.sizing.estimate import Estimate, Plan, Strategy, estimate
from anlit.sizing.gpus import GPU_BYTES

SHAPES: dict[str, dict[str, int]] = {
    "0.25B": {"n_layers": 18, "d_model": 768, "n_heads": 12},
    "0.5B": {"n_layers": 24, "d_model": 1024, "n_heads": 16},
    "1B": {"n_layers": 36, "d_model": 1280, "n_heads": 20},
    "7B": {"n_layers": 24, "d_model": 4096, "n_heads": 32},
}
"""0.5B and 1B are [nGPT]'s, the others our choice; MLP 4·d, T = 2048."""
VOCABULARY = 50_304
GPUS = (1, 4, 8, 64)
TOKENS_PER_PARAMETER = 20
"""Training tokens per parameter: the compute-optimal number of arXiv 2203.15556."""
PERSISTENT_BYTES = 16
"""Bytes per parameter in mixed precision without sharding: weight, gradient and two moments, in float32."""
BATCHES = (16, 8, 4, 2, 1)
"""Sequences in a micro-batch to try; the table has the first that fits."""


@dataclass(frozen=True)
class Row:
    """One size of one architecture on a number of GPUs; the estimate is of the last attempt if none fits."""

    architecture: str
    size: str
    estimate: Estimate

    def record(self) -> dict[str, Any]:
        return {"architecture": self.architecture, "size": self.size, **self.estimate.record()}


def sizing_table(gpu: str, mfu: float) -> list[Row]:
    """A row for each architecture, size and number of GPUs."""
    rows = []
    for architecture in (GPT, AnGPT):
        for size, shape in SHAPES.items():
            with torch.device("meta"):
                model = architecture(vocab_size=VOCABULARY, **shape)  # type: ignore[arg-type]
            tokens = float(TOKENS_PER_PARAMETER * model.model.n_parameters())
            for gpus in GPUS:
                plan = Plan(gpus=gpus, gpu=gpu, mfu=mfu, length=model.context_length, tokens=tokens)
                rows.append(Row(architecture.__name__, size, first_that_fits(model, plan)))
    return rows


def first_that_fits(model: Any, plan: Plan) -> Estimate:
    """The estimate of the first attempt that fits, else of the last, which needs the least memory."""
    state = PERSISTENT_BYTES * model.model.n_parameters()
    for attempt in attempts(plan):
        hopeless = attempt.strategy != "fsdp" and state > GPU_BYTES[plan.gpu]
        if hopeless and (plan.gpus > 1 or (attempt.batch_size, attempt.checkpoint_every) != (1, 1)):
            continue
        result = estimate(model, attempt)
        if result.fits:
            break
    return result


def attempts(plan: Plan) -> Iterator[Plan]:
    """Plans from the fastest to the one with the least memory: DDP before FSDP, then without recomputation first."""
    strategies: tuple[Strategy, ...] = ("1gpu",) if plan.gpus == 1 else ("ddp", "fsdp")
    for strategy in strategies:
        for checkpoint_every in (None, 1):
            for batch_size in BATCHES:
                yield replace(plan, strategy=strategy, checkpoint_every=checkpoint_every, batch_size=batch_size)
