"""Block sizes of each kernel, by head width, dtype and device.

With them the kernels spill few or no registers (`tests/nn/attention/registers.py`). Other sizes
have not been timed. They are fixed, because they decide the order of sums. So the same run on the
same device gives the same bits.
"""

from typing import NamedTuple

import torch

PADDING = 128
"""Entries past the last distance that kernels may read. It is the largest number of queries in a
block."""


class Blocks(NamedTuple):
    """Queries and keys that a program computes at a time, its warps, and stages of its loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class KernelBlocks(NamedTuple):
    """The blocks of the three kernels."""

    forward: Blocks
    backward_queries: Blocks
    backward_keys: Blocks


SMALL = KernelBlocks(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1))
"""For the interpreter: tests need many blocks in short sequences."""

FLOAT32 = {
    64: KernelBlocks(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2)),
    256: KernelBlocks(Blocks(32, 16, 4, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1)),
}
"""float32, by the largest head width. It needs twice the memory and has no matrix units; it serves
as a reference."""

HALF_8 = {
    64: KernelBlocks(Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    128: KernelBlocks(Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2)),
    256: KernelBlocks(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
}
"""bfloat16 and float16 on compute capability 8.x and 12.x, by the largest head width. A program has
99 kB of shared memory on 8.6, 8.9 and 12.0."""

HALF_9 = {
    64: KernelBlocks(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    128: KernelBlocks(Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2), Blocks(32, 128, 8, 2)),
    256: KernelBlocks(Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1)),
}
"""bfloat16 and float16 on compute capability 9.0 to 11.x, by the largest head width."""


def blocks_for(
    width_padded: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> KernelBlocks:
    """The blocks for heads of `width_padded`, a power of two up to 256.

    `capability` is a GPU's, None for a CPU.
    """
    if capability is None:
        return SMALL
    by_width = HALF_9 if (9, 0) <= capability < (12, 0) else HALF_8
    if dtype == torch.float32:
        by_width = FLOAT32
    for widest, blocks in by_width.items():
        if width_padded <= widest:
            return blocks
    raise AssertionError(f"heads of {width_padded} are wider than all blocks")
