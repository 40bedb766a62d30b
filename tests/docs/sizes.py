"""The table of sizes on docs/results/speed.md; `python -m tests.docs.sizes` prints it."""

from typing import Any, NamedTuple

import torch

from anlit import GPT, AnGPT, RoPE
from anlit.sizing.estimate import estimate
from anlit.sizing.plan import Plan

ARCHITECTURES = {"GPT": GPT, "AnGPT": AnGPT}
LENGTH = 2048
VOCAB_SIZE = 50304
TOKENS_PER_PARAMETER = 20
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Shape(NamedTuple):
    n_layers: int
    d_model: int
    n_heads: int


SHAPES = {
    "0.25B": Shape(18, 768, 12),
    "0.5B": Shape(24, 1024, 16),
    "1B": Shape(36, 1280, 20),
    "7B": Shape(24, 4096, 32),
}
GPUS = (1, 4, 8, 64)


def make_model(architecture: str, size: str) -> Any:
    """Return a model of this size on the meta device."""
    with torch.device("meta"):
        return ARCHITECTURES[architecture](
            vocab_size=VOCAB_SIZE,
            context_length=LENGTH,
            positions=RoPE(fraction=0.5),
            **SHAPES[size]._asdict(),
        )


def estimate_run(model: Any, size: str, gpus: int, batch_size: int) -> dict[str, Any]:
    """Estimate a run on H100s in bf16-mixed, as `anlit size` does."""
    strategy: Any = "1gpu"
    if gpus > 1:
        strategy = "fsdp" if size == "7B" else "ddp"
    plan = Plan(
        gpus=gpus,
        strategy=strategy,
        batch_size=batch_size,
        length=LENGTH,
        tokens=float(TOKENS_PER_PARAMETER * model.model.n_parameters()),
    )
    return estimate(model, plan)


def row_of(architecture: str, size: str, result: dict[str, Any]) -> str:
    """Return the Markdown row of a run that fits."""
    plan = result["plan"]
    n_parameters = result["parameters"]["total"]
    bytes_on_gpu = result["peak"] + result["allowance"]
    cells = [
        architecture,
        size,
        f"{n_parameters / 1e6:,.0f}M",
        str(plan.gpus),
        plan.strategy,
        str(plan.batch_size),
        f"{bytes_on_gpu / 1e9:.1f}",
        f"{result['days']:.2g}",
    ]
    return f"| {' | '.join(cells)} |"


def largest_row(architecture: str, size: str, gpus: int) -> str:
    """Return the row for the largest micro-batch that fits."""
    model = make_model(architecture, size)
    row = None
    for batch_size in MICRO_BATCHES:
        result = estimate_run(model, size, gpus, batch_size)
        if not result["fits"]:
            break
        row = row_of(architecture, size, result)
    if row is None:
        parameters = f"{model.model.n_parameters() / 1e6:,.0f}M"
        return f"| {architecture} | {size} | {parameters} | {gpus} | 1gpu | – | does not fit | – |"
    return row


if __name__ == "__main__":
    for architecture in ARCHITECTURES:
        for size in SHAPES:
            for gpus in GPUS:
                print(largest_row(architecture, size, gpus), flush=True)
