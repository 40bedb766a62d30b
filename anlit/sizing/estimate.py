"""Bytes per GPU, tokens per second and days from a model and a plan of the run, and their tables for the terminal."""

from typing import Any

import torch

from anlit.nn.models.flops import flops_per_token
from anlit.reporting.table import SafeConsole, Table
from anlit.sizing.plan import GPU_BYTES, Plan
from anlit.sizing.trace import Role, step_memory
from anlit.training.callbacks.throughput import PEAKS, product_type
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups

FRAGMENTATION = 0.05
"""Allowance for memory that the allocator reserves but does not use; small, because all blocks have equal shapes."""
CONTEXT_BYTES = 1.5e9
"""Our allowance for other memory on the GPU: CUDA context, cuBLAS workspaces, NCCL's buffers."""
NAMES: dict[Role, str] = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
    "weight copies": "copies of weights for computing", "blocks": "activations of the blocks",
    "rest": "logits, loss and workspace",
}  # fmt: skip
"""Names for users of the roles in a trace."""


def estimate(model: LanguageModel, plan: Plan) -> dict[str, Any]:
    """The needs of a model (on the meta device) under a plan, as `anlit size --json` writes them.

    Returns:
        `plan`; `parameters`: their number by role, and `total`. In bytes on one GPU: `memory` by purpose, `peak`: its
        sum, which `torch.cuda.max_memory_allocated` would report, `allowance`: for fragmentation and memory outside
        torch, `gpu_bytes`; `fits`: whether there is room. `cache_bytes`: keys and values of one generated sequence of
        the plan's length, in bfloat16. `flops_per_token`: of a training step, for sequences of one document.
        `tokens_per_second`: of all GPUs. `days`: for the plan's tokens; None if it has none.
    """
    groups = parameter_groups(model.model)
    parameters = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
    memory, gpu_bytes = memory_by_purpose(model, plan), GPU_BYTES[plan.gpu]
    peak = sum(memory.values())
    allowance = FRAGMENTATION * peak + CONTEXT_BYTES
    flops = flops_per_token(model.model, plan.length)
    rate = plan.gpus * PEAKS[plan.gpu][product_type(plan.precision)] * plan.mfu / flops
    return {
        "plan": plan,
        "parameters": parameters | {"total": sum(parameters.values())},
        "memory": memory,
        "peak": peak,
        "allowance": allowance,
        "gpu_bytes": gpu_bytes,
        "fits": peak + allowance <= gpu_bytes,
        "cache_bytes": model.model.cache_bytes(plan.length, torch.bfloat16.itemsize),
        "flops_per_token": flops,
        "tokens_per_second": rate,
        "days": plan.tokens / rate / 86_400 if plan.tokens is not None else None,
    }


def memory_by_purpose(model: LanguageModel, plan: Plan) -> dict[str, float]:
    """Bytes on one GPU at the peak of a step.

    In fully sharded training each block is a unit; embedding and head are the outer unit, which stays gathered from
    forward to backward, and whose gradient is complete until the end. Two blocks are gathered: the one that computes
    and the next one. One block has its gradient complete, with a float32 copy that is being reduced.
    """
    traced = step_memory(model, plan)
    memory: dict[str, float] = {name: traced[role] for role, name in NAMES.items()}
    if plan.strategy == "ddp":
        # DDP's buckets are never freed. Gradients are views into them (gradient_as_bucket_view, as in ddp.yaml).
        memory["gradients"] = plan.kept_bytes * model.model.n_parameters()
    if plan.is_sharded:
        blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.blocks]
        outer, block, width = (
            model.model.n_parameters() - sum(blocks),
            max(blocks),
            plan.gathered_bytes,
        )
        memory["FSDP's gathered weights and gradients"] = (
            2 * width * outer + 2 * width * block + (width + 4) * block
        )
    return {name: size for name, size in memory.items() if size}


def show(console: SafeConsole, result: dict[str, Any]) -> None:
    """Print parameters, memory per GPU and time of one run."""
    plan: Plan = result["plan"]
    parameters = [[name, f"{number:,}"] for name, number in result["parameters"].items()]
    console.print(Table("Model", ["parameters", "number"], parameters))
    cache = f"{result['cache_bytes'] / 1e6:,.3g} MB"
    console.print(
        f"Keys and values of one sequence of {plan.length:,} tokens, to generate in bfloat16: {cache}.\n"
    )

    recompute = "none" if plan.checkpoint_every is None else f"every {plan.checkpoint_every}"
    title = f"{plan.gpus} × {plan.gpu}, {plan.strategy}, {plan.precision}, batch {plan.batch_size} × {plan.length}, "
    memory = {
        **result["memory"],
        "peak": result["peak"],
        f"fragmentation ({FRAGMENTATION:.0%}), CUDA and NCCL (allowance)": result["allowance"],
        f"{'fits' if result['fits'] else 'DOES NOT FIT'} {result['gpu_bytes'] / 1e9:.0f} GB":
            result["peak"] + result["allowance"],
    }  # fmt: skip
    unit, per = ("GB", 1e9) if result["peak"] >= 1e8 else ("MB", 1e6)
    rows = [[name, f"{size / per:,.2f}"] for name, size in memory.items()]
    head = ["memory on one GPU at the peak of a step", unit]
    console.print(Table(f"{title}blocks recomputed: {recompute}", head, rows))

    time = [
        ["FLOPs per token, forward and backward", f"{result['flops_per_token']:.3e}"],
        ["tokens per second", f"{result['tokens_per_second']:,.0f}"],
    ]
    if (days := result["days"]) is not None:
        unit, n_units = ("days", days) if days >= 0.1 else ("seconds", days * 86_400)
        time.append([f"{unit} for {plan.tokens:.3g} tokens", f"{n_units:.3g}"])
    kind = product_type(plan.precision)
    title = f"at {plan.mfu:.0%} of {PEAKS[plan.gpu][kind] / 1e12:.3g} TFLOP/s (dense {kind})"
    console.print(Table(title, ["time", ""], time))
    console.print(
        "All of it is for a GPU. FLOPs are of sequences of one document, activations of uncompiled blocks."
    )
