"""The plan of a run for an estimate, and the GPUs of a plan; without torch, for --help."""

from dataclasses import dataclass
from typing import Literal

from anlit.config.value_checks import Precision

GPU_BYTES = {"A100": 80e9, "H100": 80e9, "H200": 141e9}


@dataclass(frozen=True)
class Plan:
    """A plan for training a model.

    Attributes:
        gpus: GPUs on all nodes.
        strategy: fsdp shards parameters, gradients and optimizer over the GPUs of a replica.
        precision: Lightning's precision.
        replicas: Complete copies of the model, with fsdp; the strategy's `replicas`.
        reshard: Whether fsdp frees a block's parameters after its forward pass; the strategy's
            `reshard_after_forward`.
        gather: The dtype in which fsdp gathers parameters; the strategy's `gather_dtype`.
        checkpoint_every: Recompute every n-th block in the backward pass. None recomputes none.
        batch_size: Sequences in a micro-batch on one GPU.
        length: T, tokens in a sequence.
        accumulate: Micro-batches in an optimizer step.
        gpu: A key of `GPU_BYTES`.
        mfu: Expected share of the data sheet's peak FLOP/s in useful work.
        tokens: Training tokens of the whole run.
        has_average: Whether the GPU also holds an average of the weights.
    """

    gpus: int = 1
    strategy: Literal["1gpu", "ddp", "fsdp"] = "1gpu"
    precision: Precision = "bf16-mixed"
    replicas: int = 1
    reshard: bool = True
    gather: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int | None = None
    batch_size: int = 8
    length: int = 2048
    accumulate: int = 1
    gpu: str = "H100"
    mfu: float = 0.4
    tokens: float | None = None
    has_average: bool = False

    @property
    def n_shards(self) -> int:
        """GPUs that share a copy of the parameters."""
        return self.gpus // self.replicas if self.strategy == "fsdp" else 1

    @property
    def is_sharded(self) -> bool:
        return self.n_shards > 1

    @property
    def stored_bytes(self) -> int:
        """Bytes of a number in the parameters and gradients that the optimizer sees."""
        return {"bf16-true": 2, "64-true": 8}.get(self.precision, 4)

    @property
    def average_bytes(self) -> int:
        """Bytes of a number in the average of the weights."""
        return max(4, self.stored_bytes)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a number in the parameters that a block computes with."""
        is_gathered_in_bfloat16 = self.is_sharded and self.gather == "bfloat16"
        return 2 if is_gathered_in_bfloat16 else self.stored_bytes

    def recomputes(self, block: int) -> bool:
        """Return whether the backward pass recomputes a block, given its number from 0."""
        return self.checkpoint_every is not None and block % self.checkpoint_every == 0
