"""`anlit benchmark attention --blocks`: block sizes of our Triton kernels.

Each kernel is timed with the blocks that `anlit/attention/backends/triton/blocks.py` names and with their neighbours:
half and twice the queries, keys and warps, one pipeline stage less and one more. The other kernels keep their blocks.
What does not compile, does not fit or computes something else is left out. With TRITON_INTERPRET=1 it runs on a CPU,
where the times say nothing.
"""

from collections.abc import Iterator
from functools import partial

import torch

from anlit.attention.backends.triton.blocks import Blocks, KernelBlocks, forced
from anlit.benchmarks.attention.measure import build
from anlit.benchmarks.attention.shapes import Plan, Shape
from anlit.benchmarks.cases import Case, Group, Ready, Row

ENTRANT = ("scale-invariant", "triton")
RANGES = {"queries": (16, 128), "keys": (16, 128), "warps": (4, 8), "stages": (1, 4)}
"""The smallest and the largest of each size."""


def neighbours(blocks: Blocks) -> list[Blocks]:
    """These blocks, then those with one size changed."""
    found = [blocks]
    for name, size in blocks._asdict().items():
        smallest, largest = RANGES[name]
        others = (size - 1, size + 1) if name == "stages" else (size // 2, 2 * size)
        found += [blocks._replace(**{name: other}) for other in others if smallest <= other <= largest]
    return found


def groups(plan: Plan, device: torch.device) -> Iterator[Group]:
    """A group for each shape and kernel, with a case for each of the kernel's blocks."""
    from anlit.attention.backends.triton.launch import own_blocks

    mechanism, backend = ENTRANT
    for shape in plan.shapes():
        own = own_blocks(torch.empty(1, 1, 1, shape.width, dtype=plan.dtype, device=device))
        for kernel in KernelBlocks._fields:
            cases = [
                Case(
                    "{} × {}, {} warps, {} stages".format(*blocks),
                    partial(_build, own._replace(**{kernel: blocks}), shape, plan, device),
                    {"mechanism": mechanism, "kernel": backend, "changed": kernel, "blocks": list(blocks)},
                )
                for blocks in neighbours(getattr(own, kernel))
            ]
            yield Group(f"{kernel}, {shape.label}", cases, {"shape": vars(shape)})


def _build(
    blocks: KernelBlocks,
    shape: Shape,
    plan: Plan,
    device: torch.device,
    rows: list[Row],
) -> Ready:
    with forced(blocks):
        ready = build(shape, plan, device, rows)

    def turn() -> dict[str, float]:
        with forced(blocks):
            return dict(ready.turn())

    return Ready(turn, ready.facts)
