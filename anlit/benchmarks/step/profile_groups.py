"""Where the time of a step goes: torch.profiler's events, each counted for the part of the step that it belongs to."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CLIPPING, NORMS, OPTIMIZER = "clipping", "norm restoration", "optimizer"
MATRICES, ATTENTION, LOSS, ELEMENTWISE, REST = "matrix products", "attention", "loss", "elementwise", "rest"
GROUPS = (MATRICES, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER, CLIPPING, NORMS, REST)
LARGEST = 25

# What is marked decides first, the innermost of it; then the operator, the first that fits.
RANGES = {"anlit::clipping": CLIPPING, "anlit::norms": NORMS, "anlit::loss": LOSS}
PASS = "anlit::pass"
"""The forward or backward pass: it runs inside the optimizer's step, and is none of it."""
OPERATORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (MATRICES, ("aten::mm", "aten::matmul", "aten::linear", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkl_linear",
                "aten::_scaled_mm", "gemm", "cutlass", "nvjet")),
    (ATTENTION, ("scaled_dot_product", "flash_attention", "flash_attn", "flash_fwd", "flash_bwd", "flex_attention",
                 "efficient_attention", "anlit::attention", "fmha", "cudnn_attention")),
    (LOSS, ("log_softmax", "nll_loss", "cross_entropy", "logsumexp", "linear_cross_entropy")),
    (OPTIMIZER, ("_fused_adam",)),
)  # fmt: skip
ELEMENTWISE_PREFIXES = ("aten::", "triton_", "graph_", "## Call", "CompiledFunction", "Torch-Compiled", "cpp_fused",
                        "void ", "at::", "Memcpy", "Memset")  # fmt: skip
LOSS_BACKWARD = "CrossEntropy"
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function inside a range that `group_of` finds."""

    def run(*arguments: Any, **more: Any) -> Any:
        with record_function(name):
            return function(*arguments, **more)

    return run


def group_of(names: Sequence[str]) -> str:
    """The group of an event.

    Args:
        names: Its own name, that of what called it, and so on outwards.
    """
    inside, surrounding = list(names), None
    for number, name in enumerate(names):
        if LOSS_BACKWARD in name:
            surrounding = LOSS
        elif name.startswith("Optimizer."):
            inside, surrounding = inside[:number], OPTIMIZER
        elif name in RANGES:
            inside, surrounding = inside[:number], RANGES[name]
        if surrounding is not None or name == PASS:
            break
    if surrounding in (CLIPPING, NORMS):
        return surrounding
    for name in inside[:3]:  # an operator calls others of its kind; what is further out merely called it
        for group, parts in OPERATORS:
            if any(part in name for part in parts):
                return group
    is_work = bool(inside) and inside[0].startswith(ELEMENTWISE_PREFIXES)
    return (surrounding or ELEMENTWISE) if is_work else REST


def seconds_by_group(run: Callable[[], Any], device: torch.device, steps: int) -> tuple[dict[str, float], list[Any]]:
    """Profile `steps` calls of `run`.

    Returns:
        Seconds of a step by group: of the device's kernels on a GPU, of the operators themselves on CPU; and what took
        most of it, as [name, group, seconds of a step].
    """
    cuda = device.type == "cuda"
    logging.getLogger("torch.profiler").setLevel(logging.ERROR)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as profiler:
        for _ in range(steps):
            run()
        if cuda:
            torch.cuda.synchronize(device)
    groups: Counter[str] = Counter(dict.fromkeys(GROUPS, 0.0))
    largest: Counter[tuple[str, str]] = Counter()
    for event in profiler.events() or ():
        own = [(event.name, event.self_cpu_time_total)]
        for name, microseconds in [(k.name, k.duration) for k in event.kernels] if cuda else own:
            if microseconds <= 0 or name.startswith(WAITING):
                continue
            group = group_of(_outwards(event, name))
            groups[group] += microseconds * 1e-6 / steps
            largest[name, group] += microseconds * 1e-6 / steps
    return dict(groups), [[*key, value] for key, value in largest.most_common(LARGEST)]


def _outwards(event: Any, own: str) -> list[str]:
    names = [own]
    while event is not None:
        if event.name != names[-1]:
            names.append(event.name)
        event = event.cpu_parent
    return names
