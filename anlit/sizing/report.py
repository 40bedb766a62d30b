"""The numbers as tables in the terminal."""

from rich.console import Console
from rich.table import Table

from anlit.sizing.estimate import DENSE_BF16, FRAGMENTATION, GPU_BYTES, Estimate
from anlit.sizing.table import TOKENS_PER_PARAMETER, Row

GB = 1e9


def show(console: Console, result: Estimate) -> None:
    """One run: parameters, memory per GPU, time."""
    plan = result.plan
    parameters = Table("parameters", "number", title="Model")
    for name, number in result.parameters.items():
        parameters.add_row(name, f"{number:,}")
    console.print(parameters)

    recompute = "none" if plan.checkpoint_every is None else f"every {plan.checkpoint_every}"
    memory = Table(
        "memory on one GPU at the peak of a step",
        "GB",
        title=f"{plan.gpus} × {plan.gpu}, {plan.strategy}, {plan.precision}, batch {plan.batch_size} × {plan.length}, "
        f"blocks recomputed: {recompute}",
    )
    for name, size in result.memory.items():
        memory.add_row(name, f"{size / GB:.2f}")
    memory.add_section()
    memory.add_row("peak", f"{result.peak / GB:.2f}")
    memory.add_row(f"fragmentation ({FRAGMENTATION:.0%}), CUDA and NCCL (allowance)", f"{result.allowance / GB:.2f}")
    verdict = "fits" if result.fits else "DOES NOT FIT"
    memory.add_row(f"{verdict} {GPU_BYTES[plan.gpu] / GB:.0f} GB", f"{(result.peak + result.allowance) / GB:.2f}")
    console.print(memory)

    time = Table("time", "", title=f"at {plan.mfu:.0%} of {DENSE_BF16[plan.gpu] / 1e12:.0f} TFLOP/s (dense bf16)")
    time.add_row("FLOPs per token, forward and backward", f"{result.flops_per_token:.3e}")
    time.add_row("tokens per second", f"{result.tokens_per_second:,.0f}")
    if plan.tokens is not None and result.days is not None:
        time.add_row(f"days for {plan.tokens:.3g} tokens", f"{result.days:.3g}")
    console.print(time)
    console.print(
        "FLOPs count each sequence as one document; activations are those of uncompiled blocks, and a mask of T × T "
        "where documents are masked or distances biased on the sdpa back end."
    )


def show_table(console: Console, rows: list[Row]) -> None:
    """All sizes; what does not fit is marked."""
    plan = rows[0].estimate.plan
    table = Table(
        title=f"{plan.gpu} {GPU_BYTES[plan.gpu] / GB:.0f} GB, bf16-mixed, T {plan.length}, MFU {plan.mfu:.0%}, "
        f"{TOKENS_PER_PARAMETER} tokens per parameter; the largest micro-batch that fits"
    )
    for name in ("architecture", "size", "parameters", "GPUs", "strategy", "recompute", "batch", "GB per GPU"):
        table.add_column(name, justify="left" if name in ("architecture", "size", "strategy") else "right")
    for name in ("tokens/s", "days", ""):
        table.add_column(name, justify="right")
    for row in rows:
        result, plan = row.estimate, row.estimate.plan
        table.add_row(
            row.architecture,
            row.size,
            f"{result.parameters['total'] / 1e6:,.0f}M",
            str(plan.gpus),
            plan.strategy,
            "no" if plan.checkpoint_every is None else "all",
            str(plan.batch_size),
            f"{(result.peak + result.allowance) / GB:.1f}",
            f"{result.tokens_per_second:,.0f}" if result.fits else "–",
            f"{result.days:.2g}" if result.fits and result.days is not None else "–",
            "" if result.fits else "does not fit",
        )
    console.print(table)
