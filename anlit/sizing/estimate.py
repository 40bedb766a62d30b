"""Computes bytes per GPU, tokens per second and days from a model and a plan of the run."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from anlit.models.flops import flops_per_token
from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import parameter_groups
from anlit.sizing.plan import DENSE_BF16, GPU_BYTES, Plan
from anlit.sizing.trace import step_memory

FRAGMENTATION = 0.05
"""Allowance for memory that the allocator reserves but does not use; small, because all blocks have equal shapes."""
CONTEXT_BYTES = 1.5e9
"""Our allowance for other memory on the GPU: CUDA context, cuBLAS workspaces, NCCL's buffers."""


@dataclass(frozen=True)
class Estimate:
    """The needs of a plan; memory in bytes on one GPU.

    Args:
        parameters: Number of parameters by role, and `total`.
        memory: Memory by purpose. The sum is the peak that `torch.cuda.max_memory_allocated` would report.
        allowance: For fragmentation and memory outside torch.
        cache_bytes: Of the keys and values of one generated sequence of the plan's length, in bfloat16.
        flops_per_token: FLOPs of a training step per token, for sequences of one document.
        tokens_per_second: Of all GPUs together.
        days: For the plan's tokens; None if it has none.
    """

    plan: Plan
    parameters: dict[str, int]
    memory: dict[str, float]
    allowance: float
    cache_bytes: int
    flops_per_token: float
    tokens_per_second: float
    days: float | None

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether peak and allowance are within the GPU's memory."""
        return self.peak + self.allowance <= GPU_BYTES[self.plan.gpu]

    def record(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        return asdict(self) | {"peak": self.peak, "gpu_bytes": GPU_BYTES[self.plan.gpu], "fits": self.fits}


def estimate(model: LanguageModel, plan: Plan) -> Estimate:
    """Size a model (on the meta device) under a plan."""
    groups = parameter_groups(model.model)
    parameters = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
    parameters["total"] = sum(parameters.values())
    flops = flops_per_token(model.model, plan.length)
    rate = plan.gpus * DENSE_BF16[plan.gpu] * plan.mfu / flops
    memory = memory_by_purpose(model, plan)
    return Estimate(
        plan=plan,
        parameters=parameters,
        memory=memory,
        allowance=FRAGMENTATION * sum(memory.values()) + CONTEXT_BYTES,
        cache_bytes=model.model.cache_bytes(plan.length, torch.bfloat16.itemsize),
        flops_per_token=flops,
        tokens_per_second=rate,
        days=plan.tokens / rate / 86_400 if plan.tokens is not None else None,
    )


def memory_by_purpose(model: LanguageModel, plan: Plan) -> dict[str, float]:
    """Bytes on one GPU at the peak of a step."""
    peak = step_memory(model, plan)
    memory: dict[str, float] = {
        "parameters": peak["parameters"],
        "gradients": peak["gradients"],
        "optimizer state": peak["optimizer"],
        "copies of weights for computing": peak["weight copies"],
        "activations of the blocks": peak["blocks"],
        "logits, loss and workspace": peak["rest"],
    }
    if plan.strategy == "ddp":
        # DDP's buckets are never freed. Gradients are views into them (gradient_as_bucket_view, as in ddp.yaml).
        memory["gradients"] = plan.kept_bytes * model.model.n_parameters()
    if plan.is_sharded:
        memory["FSDP's gathered weights and gradients"] = gathered_memory(model, plan.gathered_bytes)
    return {name: size for name, size in memory.items() if size}


def gathered_memory(model: LanguageModel, width: int) -> float:
    """Unsharded memory in fully sharded training. Each block is a unit; embedding and head are the outer unit.

    The outer unit stays gathered from forward to backward, and its gradient is complete until the end. Two blocks are
    gathered: the one that computes and the next one. One block has its gradient complete, with a float32 copy that is
    being reduced.

    Args:
        width: Bytes per number in the dtype that a block computes in.
    """
    block = max(sum(p.numel() for p in block.parameters()) for block in model.model.blocks)
    outer = model.model.n_parameters() - sum(p.numel() for b in model.model.blocks for p in b.parameters())
    return float(2 * width * outer + 2 * width * block + (width + 4) * block)
