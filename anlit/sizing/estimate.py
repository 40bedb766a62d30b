"""Computes bytes per GPU, tokens per second and days from a model and a plan of the run."""

from dataclasses import dataclass

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
        memory: Memory by purpose.
        peak: Its sum, which `torch.cuda.max_memory_allocated` would report.
        allowance: For fragmentation and memory outside torch.
        fits: Whether peak and allowance are within `gpu_bytes`.
        cache_bytes: Of the keys and values of one generated sequence of the plan's length, in bfloat16.
        flops_per_token: FLOPs of a training step per token, for sequences of one document.
        tokens_per_second: Of all GPUs together.
        days: For the plan's tokens; None if it has none.
    """

    plan: Plan
    parameters: dict[str, int]
    memory: dict[str, float]
    peak: float
    allowance: float
    gpu_bytes: float
    fits: bool
    cache_bytes: int
    flops_per_token: float
    tokens_per_second: float
    days: float | None


def estimate(model: LanguageModel, plan: Plan) -> Estimate:
    """Size a model (on the meta device) under a plan."""
    groups = parameter_groups(model.model)
    parameters = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
    memory, gpu_bytes = memory_by_purpose(model, plan), GPU_BYTES[plan.gpu]
    peak = sum(memory.values())
    allowance = FRAGMENTATION * peak + CONTEXT_BYTES
    flops = flops_per_token(model.model, plan.length)
    rate = plan.gpus * DENSE_BF16[plan.gpu] * plan.mfu / flops
    return Estimate(
        plan=plan,
        parameters=parameters | {"total": sum(parameters.values())},
        memory=memory,
        peak=peak,
        allowance=allowance,
        gpu_bytes=gpu_bytes,
        fits=peak + allowance <= gpu_bytes,
        cache_bytes=model.model.cache_bytes(plan.length, torch.bfloat16.itemsize),
        flops_per_token=flops,
        tokens_per_second=rate,
        days=plan.tokens / rate / 86_400 if plan.tokens is not None else None,
    )


def memory_by_purpose(model: LanguageModel, plan: Plan) -> dict[str, float]:
    """Bytes on one GPU at the peak of a step.

    In fully sharded training each block is a unit; embedding and head are the outer unit, which stays gathered from
    forward to backward, and whose gradient is complete until the end. Two blocks are gathered: the one that computes
    and the next one. One block has its gradient complete, with a float32 copy that is being reduced.
    """
    traced = step_memory(model, plan)
    memory: dict[str, float] = {
        "parameters": traced["parameters"],
        "gradients": traced["gradients"],
        "optimizer state": traced["optimizer"],
        "copies of weights for computing": traced["weight copies"],
        "activations of the blocks": traced["blocks"],
        "logits, loss and workspace": traced["rest"],
    }
    if plan.strategy == "ddp":
        # DDP's buckets are never freed. Gradients are views into them (gradient_as_bucket_view, as in ddp.yaml).
        memory["gradients"] = plan.kept_bytes * model.model.n_parameters()
    if plan.is_sharded:
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.blocks]
        outer, block, width = model.model.n_parameters() - sum(blocks), max(blocks), plan.gathered_bytes
        memory["FSDP's gathered weights and gradients"] = 2 * width * outer + 2 * width * block + (width + 4) * block
    return {name: size for name, size in memory.items() if size}
