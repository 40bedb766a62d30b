"""Bytes per GPU, tokens per second and days of a planned run, and their tables for the terminal."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anlit.nn.models.flops import flops_per_token
from anlit.reporting.table import SafeConsole, Table
from anlit.reporting.text import short_number, three_digits
from anlit.sizing.plan import GPU_BYTES, Plan
from anlit.sizing.trace import Role, step_memory
from anlit.training.callbacks.throughput import PEAKS, product_type
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups

FRAGMENTATION = 0.05
"""Allowance for memory that the allocator reserves and does not use. It is small, because all
blocks have equal shapes."""
CONTEXT_BYTES = 1.5e9
"""Our allowance for other memory on the GPU: CUDA context, cuBLAS workspaces, NCCL's buffers."""
SECONDS_PER_DAY = 86_400
PURPOSES: dict[Role, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "weight copies": "copies of weights for computing",
    "blocks": "activations of the blocks",
    "workspace": "logits, loss and workspace",
}
"""Names of the roles in tables and in the JSON file."""
AVERAGE = "average of the weights"
"""The purpose of a callback that averages weights."""


def estimate(model: LanguageModel, plan: Plan) -> dict[str, Any]:
    """Estimate the needs of a run, as `anlit size --json` writes them.

    Args:
        model: The model, on the meta device.
        plan: The plan of the run.

    Returns:
        - `plan`.
        - `parameters`: their number by group, and `total`.
        - `memory`: bytes on one GPU by purpose.
        - `peak`: the sum of `memory`, which `torch.cuda.max_memory_allocated` would report.
        - `allowance`: bytes for fragmentation, and for memory outside torch.
        - `gpu_bytes`: the GPU's memory.
        - `fits`: whether peak and allowance fit into it.
        - `cache_bytes`: keys and values, in bfloat16, of one sequence of the plan's length.
        - `flops_per_token`: of a training step, for sequences of one document.
        - `tokens_per_second`: of all GPUs.
        - `days`: for the plan's tokens. None if the plan has none.
    """
    parameters = {}
    for group in parameter_groups(model.model):
        parameters[group["name"]] = count_parameters(group["params"])
    memory = memory_by_purpose(model, plan)
    peak = sum(memory.values())
    allowance = FRAGMENTATION * peak + CONTEXT_BYTES
    gpu_bytes = GPU_BYTES[plan.gpu]
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
        "days": None if plan.tokens is None else plan.tokens / rate / SECONDS_PER_DAY,
    }


def count_parameters(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def memory_by_purpose(model: LanguageModel, plan: Plan) -> dict[str, float]:
    """Return the bytes on one GPU at the peak of a step, without purposes that need none."""
    decoder = model.model
    bytes_by_role = step_memory(model, plan)
    memory: dict[str, float] = {}
    for role, purpose in PURPOSES.items():
        memory[purpose] = bytes_by_role[role]
    if plan.strategy == "ddp":
        # DDP never frees its buckets. Gradients are views of them (gradient_as_bucket_view).
        memory[PURPOSES["gradients"]] = plan.stored_bytes * decoder.n_parameters()
    if plan.is_sharded:
        sizes = [count_parameters(block.parameters()) for block in decoder.blocks]
        outer = decoder.n_parameters() - sum(sizes)
        memory["FSDP's gathered weights and gradients"] = gathered_memory(
            outer, max(sizes), plan.gathered_bytes, 2 * max(sizes) if plan.reshard else sum(sizes)
        )
    if plan.has_average:
        memory[AVERAGE] = plan.average_bytes * decoder.n_parameters() / plan.n_shards
    return {purpose: size for purpose, size in memory.items() if size}


def gathered_memory(outer: int, block: int, width: int, gathered: int) -> int:
    """Return the bytes that fully sharded training gathers at its peak.

    Each block is a unit. Embedding and head are the outer unit. It stays gathered from forward to
    backward, with a complete gradient. Two blocks are gathered, the present one and the next, or
    all of them. One block has its gradient complete, with a float32 copy that is being reduced.

    Args:
        outer: Parameters of the outer unit.
        block: Parameters of a block.
        width: Bytes of a gathered parameter.
        gathered: Parameters of all blocks that are gathered at a time.
    """
    outer_bytes = 2 * width * outer
    block_bytes = width * gathered
    gradient_bytes = (width + 4) * block
    return outer_bytes + block_bytes + gradient_bytes


def show(console: SafeConsole, result: dict[str, Any]) -> None:
    """Print parameters, memory per GPU and time of a run.

    Args:
        console: The terminal.
        result: What `estimate` returned.
    """
    plan: Plan = result["plan"]
    parameters = [[name, f"{number:,}"] for name, number in result["parameters"].items()]
    console.print(Table("Model", ["parameters", "number"], parameters))
    cache = f"{three_digits(result['cache_bytes'] / 1e6)} MB"
    sequence = f"one sequence of {plan.length:,} tokens"
    console.print(f"Keys and values of {sequence}, to generate in bfloat16: {cache}.\n")
    console.print(memory_table(plan, result))
    console.print(time_table(plan, result))
    console.print(
        "All of it is for a GPU. FLOPs are of sequences of one document, activations of "
        "uncompiled blocks."
    )


def memory_table(plan: Plan, result: dict[str, Any]) -> Table:
    verdict = "fits" if result["fits"] else "DOES NOT FIT"
    allowance = f"fragmentation ({FRAGMENTATION:.0%}), CUDA and NCCL (allowance)"
    memory = {
        **result["memory"],
        "peak": result["peak"],
        allowance: result["allowance"],
        f"{verdict} {result['gpu_bytes'] / 1e9:.0f} GB": result["peak"] + result["allowance"],
    }
    is_large = result["peak"] >= 1e8
    unit = "GB" if is_large else "MB"
    unit_bytes = 1e9 if is_large else 1e6
    rows = []
    for purpose, size in memory.items():
        rows.append([purpose, f"{size / unit_bytes:,.2f}"])
    recomputed = "none" if plan.checkpoint_every is None else f"every {plan.checkpoint_every}"
    title = (
        f"{plan.gpus} × {plan.gpu}, {plan.strategy}, {plan.precision}, "
        f"batch {plan.batch_size} × {plan.length}, blocks recomputed: {recomputed}"
    )
    return Table(title, ["memory on one GPU at the peak of a step", unit], rows)


def time_table(plan: Plan, result: dict[str, Any]) -> Table:
    rows = [
        ["FLOPs per token, forward and backward", f"{result['flops_per_token']:.3e}"],
        ["tokens per second", f"{result['tokens_per_second']:,.0f}"],
    ]
    days = result["days"]
    if days is not None:
        assert plan.tokens is not None, "days are for a number of tokens"
        unit, duration = ("days", days) if days >= 0.1 else ("seconds", days * SECONDS_PER_DAY)
        rows.append([f"{unit} for {short_number(plan.tokens)} tokens", three_digits(duration)])
    kind = product_type(plan.precision)
    peak = f"{three_digits(PEAKS[plan.gpu][kind] / 1e12)} TFLOP/s (dense {kind})"
    return Table(f"at {plan.mfu:.0%} of {peak}", ["time", ""], rows)
