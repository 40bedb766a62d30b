"""`anlit benchmark loss`: peak memory, time and gradients of the vocabulary projection with its cross-entropy.

Memory is the peak of forward and backward without the hidden states and the projection: the logits, all that is made
of them, and the two gradients. bfloat16 is under autocast, as in training.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.benchmarks.harness import Benchmark, Group, NotTimedError, Ready, Row
from anlit.benchmarks.options import Size, add_size_options, parse, parser_of
from anlit.nn.layers.cross_entropy import linear_cross_entropy
from anlit.reporting.table import NONE

DEFAULTS = {
    "d_model": 768, "n_layers": 1, "n_heads": 12, "vocab_size": 50_304, "length": 2048, "batch": 8, "rounds": 3,
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative error of a gradient, compared with that of the full logits."""


def full(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The usual way: all logits at once, in float32 for the softmax."""
    return cross_entropy((h @ weight.mT).flatten(0, -2).float(), targets.flatten())


def of_torch(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own chunked loss, from torch 2.13 on."""
    from torch.nn import LinearCrossEntropyOptions, functional  # type: ignore[attr-defined]

    loss: Any = functional.linear_cross_entropy  # type: ignore[attr-defined]
    return loss(h.flatten(0, -2), weight, targets.flatten(), options=LinearCrossEntropyOptions())  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "full": full, "anlit": linear_cross_entropy, "torch": of_torch,
}  # fmt: skip
"""Functions of h (B, T, d), weight (V, d), targets (B, T). They return the loss, or a tuple that ends with it."""


def group_of(size: Size, device: torch.device) -> Group:
    """All ways on the same hidden states, projection and targets."""
    torch.manual_seed(0)
    h = (
        torch.randn(size.batch, size.length, size.d_model, device=device)
        .to(size.torch_dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(size.vocab_size, size.d_model, device=device) * size.d_model**-0.5
    ).requires_grad_()
    targets = torch.randint(size.vocab_size, (size.batch, size.length), device=device)
    expected: list[Tensor] = []  # the gradients of the full logits, which come first

    def step(way: str) -> tuple[float, list[Tensor]]:
        """Loss and gradients of h and W."""
        with torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "bfloat16"):
            result = WAYS[way](h, weight, targets)
        loss = result[-1] if isinstance(result, tuple) else result
        return loss.item(), list(torch.autograd.grad(loss, (h, weight)))

    def build(row: Row, earlier: list[Row]) -> Ready:
        row["loss"], gradients = step(row["label"])
        if not earlier:
            expected.extend(gradients)
        if expected:  # the full logits had memory enough
            pairs = zip(gradients, expected, strict=True)
            row["error"] = max(float((mine - its).norm() / its.norm()) for mine, its in pairs)
            if not row["error"] <= TOLERANCE[size.torch_dtype]:
                raise NotTimedError(
                    f"it is wrong: relative error {row['error']:.1e} of its gradients"
                )
        return Ready({"step": partial(step, row["label"])})

    return Group(str(size), build, [{"label": way} for way in WAYS])


def main(argv: list[str]) -> int:
    parser = parser_of("loss", __doc__, "--threads 2 (12 GB of memory)")
    add_size_options(parser)
    parser.set_defaults(**DEFAULTS)
    given = parse(parser, argv)
    given.dtype = given.dtype or ("bfloat16" if given.device.type == "cuda" else "float32")
    benchmark = Benchmark("loss", argv, given)
    benchmark.measure([group_of(Size.of(given), given.device)])
    columns = {
        "loss": lambda row: f"{row['loss']:.5f}",
        "gradients' error": lambda row: f"{row['error']:.1e}" if "error" in row else NONE,
    }
    benchmark.publish("full", columns)
    return 0
