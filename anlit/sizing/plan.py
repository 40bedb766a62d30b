"""The plan of a run whose needs are estimated, and the GPUs that it may have; without torch, for --help."""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["1gpu", "ddp", "fsdp"]
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]

DENSE_BF16 = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
"""FLOP/s without sparsity, from NVIDIA's data sheets (SXM)."""
GPU_BYTES = {"A100": 80e9, "H100": 80e9, "H200": 141e9}


@dataclass(frozen=True)
class Plan:
    """A plan for training a model.

    Args:
        gpus: Number of GPUs on all nodes.
        strategy: One process, DDP, or parameters, gradients and optimizer state sharded over all GPUs.
        gather: The dtype in which fsdp gathers parameters; the strategy's `gather_dtype`.
        checkpoint_every: Activation checkpointing of every n-th block; None for none.
        batch_size: Sequences in a micro-batch on one GPU.
        length: T, tokens in a sequence.
        accumulate: Micro-batches in an optimizer step.
        gpu: A key of `DENSE_BF16`.
        mfu: Expected share of the peak FLOP/s in useful work.
        tokens: Training tokens of the whole run.
    """

    gpus: int = 1
    strategy: Strategy = "1gpu"
    precision: Precision = "bf16-mixed"
    gather: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int | None = None
    batch_size: int = 8
    length: int = 2048
    accumulate: int = 1
    gpu: str = "H100"
    mfu: float = 0.4
    tokens: float | None = None

    @property
    def is_sharded(self) -> bool:
        return self.strategy == "fsdp" and self.gpus > 1

    @property
    def kept_bytes(self) -> int:
        """Of a parameter, and of its gradient, as the optimizer sees them."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def gathered_bytes(self) -> int:
        """Of a parameter that a block computes with."""
        return 2 if self.is_sharded and self.gather == "bfloat16" else self.kept_bytes
