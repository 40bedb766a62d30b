"""The plan of a run whose needs are estimated, and the GPUs that it may have; without torch, for --help."""

from dataclasses import dataclass
from typing import Literal

from anlit.config.schema import Precision

GPU_BYTES = {"A100": 80e9, "H100": 80e9, "H200": 141e9}


@dataclass(frozen=True)
class Plan:
    """A plan for training a model."""

    gpus: int = 1  # on all nodes
    strategy: Literal["1gpu", "ddp", "fsdp"] = (
        "1gpu"  # fsdp shards parameters, gradients and optimizer over all GPUs
    )
    precision: Precision = "bf16-mixed"
    gather: Literal["float32", "bfloat16"] = (
        "float32"  # in which fsdp gathers parameters; the strategy's gather_dtype
    )
    checkpoint_every: int | None = None  # activation checkpointing of every n-th block
    batch_size: int = 8  # sequences in a micro-batch on one GPU
    length: int = 2048  # T, tokens in a sequence
    accumulate: int = 1  # micro-batches in an optimizer step
    gpu: str = "H100"  # a key of GPU_BYTES
    mfu: float = 0.4  # expected share of the data sheet's peak FLOP/s in useful work
    tokens: float | None = None  # of the whole run

    @property
    def is_sharded(self) -> bool:
        return self.strategy == "fsdp" and self.gpus > 1

    @property
    def kept_bytes(self) -> int:
        """Of a parameter, and of its gradient, as the optimizer sees them."""
        return {"bf16-true": 2, "64-true": 8}.get(self.precision, 4)

    @property
    def gathered_bytes(self) -> int:
        """Of a parameter that a block computes with."""
        return 2 if self.is_sharded and self.gather == "bfloat16" else self.kept_bytes
