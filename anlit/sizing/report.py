"""Tables of the numbers for the terminal."""

from anlit.reporting.table import SafeConsole, Table
from anlit.sizing.estimate import FRAGMENTATION, Estimate
from anlit.sizing.plan import DENSE_BF16

GB = 1e9


def show(console: SafeConsole, result: Estimate) -> None:
    """Print parameters, memory per GPU and time of one run."""
    plan = result.plan
    parameters = [[name, f"{number:,}"] for name, number in result.parameters.items()]
    console.print(Table("Model", ["parameters", "number"], parameters))
    cache = f"{result.cache_bytes / 1e6:,.3g} MB"
    console.print(f"Keys and values of one sequence of {plan.length:,} tokens, to generate in bfloat16: {cache}.\n")

    recompute = "none" if plan.checkpoint_every is None else f"every {plan.checkpoint_every}"
    title = f"{plan.gpus} × {plan.gpu}, {plan.strategy}, {plan.precision}, batch {plan.batch_size} × {plan.length}, "
    verdict = f"{'fits' if result.fits else 'DOES NOT FIT'} {result.gpu_bytes / GB:.0f} GB"
    memory = {
        **result.memory,
        "peak": result.peak,
        f"fragmentation ({FRAGMENTATION:.0%}), CUDA and NCCL (allowance)": result.allowance,
        verdict: result.peak + result.allowance,
    }
    head = ["memory on one GPU at the peak of a step", "GB"]
    rows = [[name, f"{size / GB:.2f}"] for name, size in memory.items()]
    console.print(Table(f"{title}blocks recomputed: {recompute}", head, rows))

    time = [
        ["FLOPs per token, forward and backward", f"{result.flops_per_token:.3e}"],
        ["tokens per second", f"{result.tokens_per_second:,.0f}"],
    ]
    if plan.tokens is not None and result.days is not None:
        time.append([f"days for {plan.tokens:.3g} tokens", f"{result.days:.3g}"])
    title = f"at {plan.mfu:.0%} of {DENSE_BF16[plan.gpu] / 1e12:.0f} TFLOP/s (dense bf16)"
    console.print(Table(title, ["time", ""], time))
    console.print("FLOPs are for sequences of one document. Activations are those of uncompiled blocks.")
