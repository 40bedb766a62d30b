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

from anlit.benchmarks.cases import (
    Case,
    Group,
    NotTimedError,
    Ready,
    Row,
    measure,
    megabytes,
    milliseconds,
    publish,
    ratio_of,
)
from anlit.benchmarks.clock import peak_bytes, seconds_of
from anlit.benchmarks.options import add_loop_options, device_of, parser_of
from anlit.benchmarks.record import Record
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.layers.cross_entropy import linear_cross_entropy
from anlit.reporting.table import NONE

SIZE = Size(768, 1, 12, 50_304, 2048, 8, torch.float32)
ROUNDS = 3
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


class Problem:
    """Hidden states, projection and targets; later also the gradients of the full logits."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device, self.low = device, size.dtype == torch.bfloat16
        self.tolerance = TOLERANCE[size.dtype]
        torch.manual_seed(0)
        h = torch.randn(size.batch, size.length, size.d_model, device=device)
        self.h = h.to(size.dtype).requires_grad_()
        self.weight = (torch.randn(size.vocab_size, size.d_model, device=device) * size.d_model**-0.5).requires_grad_()
        self.targets = torch.randint(size.vocab_size, (size.batch, size.length), device=device)
        self.expected: list[Tensor] = []

    def step(self, way: str) -> tuple[float, list[Tensor]]:
        """Loss and gradients of h and W."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            result = WAYS[way](self.h, self.weight, self.targets)
        loss = result[-1] if isinstance(result, tuple) else result
        return loss.item(), list(torch.autograd.grad(loss, (self.h, self.weight)))

    def build(self, rows: list[Row]) -> Ready:
        """Build the way of the last row. The first row has the full logits.

        Raises:
            NotTimedError: Its gradients are not those of the full logits.
        """
        way = rows[-1]["label"]
        loss, gradients = self.step(way)
        if len(rows) == 1:
            self.expected = gradients
        facts = {"loss": loss}
        if self.expected:  # the full logits had memory enough
            pairs = zip(gradients, self.expected, strict=True)
            facts["error"] = max(float((mine - its).norm() / its.norm()) for mine, its in pairs)
            if not facts["error"] <= self.tolerance:
                raise NotTimedError(f"it is wrong: relative error {facts['error']:.1e} of its gradients")
        del gradients
        call = partial(self.step, way)
        return Ready(lambda: {"step": seconds_of(call, self.device)}, facts, lambda: peak_bytes(call, (), self.device))


def main(argv: list[str]) -> int:
    """`anlit benchmark loss`; returns the exit status and raises UserError for the user's mistakes."""
    parser = parser_of("loss", __doc__, "--threads 2 (12 GB of memory)")
    add_size_options(parser)
    add_loop_options(parser)
    given = parser.parse_args(argv)
    device = device_of(given)
    if device.type == "cuda" and not given.dtype:
        given.dtype = "bfloat16"
    size = changed_size(SIZE, given)
    record = Record("loss", argv, given.output, device, size=size.as_json())
    build = Problem(size, device).build
    measure([Group(size.title, [Case(way, build) for way in WAYS])], record, given.rounds or ROUNDS, given.minutes)
    columns = {
        "MB": megabytes,
        "ms": milliseconds("step"),
        "÷ full (95 %)": ratio_of("step"),
        "loss": lambda row: f"{row['loss']:.5f}",
        "gradients' error": lambda row: f"{row['error']:.1e}" if "error" in row else NONE,
    }
    publish(record, columns)
    return 0
