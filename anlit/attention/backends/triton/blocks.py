"""How large the blocks of each kernel are, by head width, dtype and device.

A fixed choice and no timing at run time: the blocks decide in which order sums are taken, so the same run on the same
device gives the same bits.
"""

from typing import NamedTuple

import torch


PADDING = 128
"""How far past the last distance kernels may read the tables: the largest number of queries in a block."""


class Blocks(NamedTuple):
    """What a program computes at a time and with how many warps; `stages` of tiles are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class KernelBlocks(NamedTuple):
    """`tables` has square blocks."""

    forward: Blocks
    backward_queries: Blocks
    backward_keys: Blocks
    tables: Blocks


SMALL = KernelBlocks(*[Blocks(16, 16, 4, 1)] * 4)
"""For the interpreter, where tests want many blocks of short sequences."""

SINGLE = {
    64: KernelBlocks(Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 1)),
    256: KernelBlocks(Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}
"""float32 takes twice the room and no matrix units: it is there to be right."""

HALF = {
    64: KernelBlocks(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2), Blocks(64, 64, 4, 2)),
    128: KernelBlocks(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2), Blocks(64, 64, 8, 2)),
    256: KernelBlocks(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 4, 1)),
}
"""bfloat16 and float16, by the largest head width they serve."""


def blocks_for(width_padded: int, dtype: torch.dtype, device: torch.device) -> KernelBlocks:
    """The blocks for heads of `width_padded` (a power of two, ≤ 256) on `device`."""
    if device.type == "cpu":
        return SMALL
    by_width = SINGLE if dtype == torch.float32 else HALF
    return next(blocks for widest, blocks in by_width.items() if width_padded <= widest)
