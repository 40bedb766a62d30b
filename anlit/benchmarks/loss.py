"""`anlit benchmark loss`: memory, time and gradients of the vocabulary projection with its loss.

Memory is the peak of forward and backward. It has the logits, everything made of them, and the
two gradients. It leaves out hidden states and projection. bfloat16 is under autocast, as in
training.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.benchmarks.harness import Benchmark, CaseGroup, NotTimedError, Ready
from anlit.benchmarks.options import OWN_DEFAULT, Size, add_size_options, benchmark_parser, parse
from anlit.benchmarks.tables import Row
from anlit.nn.layers.cross_entropy import linear_cross_entropy
from anlit.reporting.table import NONE

DEFAULTS = {
    "d_model": 768,
    "n_layers": 1,
    "n_heads": 12,
    "vocab_size": 50_304,
    "length": 2048,
    "batch": 8,
    "rounds": 3,
}
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative difference of a gradient from the full logits' gradient."""


def full_loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss in the usual way: all logits at once, in float32 for the softmax."""
    return cross_entropy((h @ weight.mT).flatten(0, -2).float(), targets.flatten())


def torch_loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss by torch's own chunked function, which exists from torch 2.13 on."""
    from torch.nn import LinearCrossEntropyOptions, functional  # type: ignore[attr-defined]

    function: Any = functional.linear_cross_entropy  # type: ignore[attr-defined]
    options = LinearCrossEntropyOptions()
    loss: Tensor = function(h.flatten(0, -2), weight, targets.flatten(), options=options)
    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "full": full_loss,
    "anlit": linear_cross_entropy,
    "torch": torch_loss,
}
"""Functions of h (B, T, d), weight (V, d), targets (B, T). They return the loss, or a tuple with
the loss at its end."""


class LossComparison:
    """All losses on the same random hidden states, projection and targets."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        h = torch.randn(size.batch, size.length, size.d_model, device=device)
        weight = torch.randn(size.vocab_size, size.d_model, device=device) * size.d_model**-0.5
        self.h = h.to(size.torch_dtype).requires_grad_()
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(size.vocab_size, (size.batch, size.length), device=device)
        self.size = size
        self.expected: list[Tensor] | None = None  # the gradients of the full logits

    def step(self, name: str) -> tuple[float, list[Tensor]]:
        """Return a loss and its gradients by h and the projection."""
        use_bfloat16 = self.size.dtype == "bfloat16"
        with torch.autocast(self.h.device.type, torch.bfloat16, enabled=use_bfloat16):
            result = LOSSES[name](self.h, self.weight, self.targets)
        loss = result[-1] if isinstance(result, tuple) else result
        return loss.item(), list(torch.autograd.grad(loss, (self.h, self.weight)))

    def build(self, row: Row, earlier_rows: list[Row]) -> Ready:
        """Compare a loss with the full logits, unless those need too much memory."""
        row["loss"], gradients = self.step(row["label"])
        if not earlier_rows:
            self.expected = gradients
        if self.expected is not None:
            row["error"] = max(map(_relative_difference, gradients, self.expected))
            if not row["error"] <= GRADIENT_TOLERANCE[self.size.torch_dtype]:
                raise NotTimedError(
                    f"it is wrong: relative error {row['error']:.1e} of its gradients"
                )
        return Ready({"step": partial(self.step, row["label"])})


def _relative_difference(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = benchmark_parser("loss", __doc__, "--threads 2 (12 GB of memory)")
    add_size_options(parser, OWN_DEFAULT, dtype="bfloat16 on a GPU, else float32")
    parser.set_defaults(**DEFAULTS)
    options = parse(parser, argv)
    if options.dtype is None:
        options.dtype = "bfloat16" if options.device.type == "cuda" else "float32"
    return options


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    size = Size.from_options(options)
    comparison = LossComparison(size, options.device)
    group = CaseGroup(str(size), comparison.build, [{"label": name} for name in LOSSES])
    benchmark = Benchmark("loss", argv, options)
    benchmark.measure([group])
    columns = {
        "loss": lambda row: f"{row['loss']:.5f}",
        "gradients' error": lambda row: f"{row['error']:.1e}" if "error" in row else NONE,
    }
    benchmark.publish("full", columns)
    return 0
