"""Is a kernel right? Its output and gradients on random inputs against the formula in float64."""

import copy
import math
from collections.abc import Callable
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anlit.nn.kernels import eager
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.mechanisms.coefficient import shared_coefficients
from anlit.nn.mechanisms.mechanism import Mechanism

BLOCK = 128
"""Queries in a block that is checked."""
MOST_BLOCKS = 16
"""Blocks that are checked at most, evenly spaced over the first row."""

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""‖x − reference‖/‖reference‖ at most, of the output and of the gradients of q, k and v."""
LEARNED_BOUNDS = {
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.float32: 3e-5,
    torch.float64: 1e-10,
}
"""The same for what is learned, over the size of the parts that its gradient sums (`size_of_parts`)."""
SMALLEST = 1e-3
"""A reference below 1e-3 of the norm of the output's gradient counts as this large: over 65,536 keys
the gradients of q and k are about 4 times this."""
NOTHING = 1e-9
"""A reference below 1e-9 of the norm of v's gradient is 0, as for q and k where every query sees one
key: the error is relative to the gradient of v there."""
SIGN_DRAWS = 8

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]


class Inputs:
    """q, k, v and the gradient of the output (`probe`), random.

    Stored (B, T, H or G, D), viewed (B, H or G, T, D); q and k have unit root mean square.
    """

    def __init__(
        self, mechanism: Mechanism, documents: Documents, rows: int, heads: int, key_heads: int, width: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = documents.device
        generator = torch.Generator(device).manual_seed(0)
        q, k, v, probe = (
            torch.randn(
                rows, documents.length, n, width, generator=generator, device=device
            ).transpose(1, 2)
            for n in (heads, key_heads, key_heads, heads)
        )
        self.q = with_unit_rms(q).to(dtype).requires_grad_()
        self.k = with_unit_rms(k).to(dtype).requires_grad_()
        self.v = v.to(dtype).requires_grad_()
        self.probe = probe.to(dtype)
        self.mechanism = mechanism.to(device)
        self.documents = documents

    def forward(self, attend: Attend) -> Tensor:
        return attend(self.q, self.k, self.v, self.mechanism, self.documents, 0.0)

    def both(self, attend: Attend, probe: Tensor | None = None) -> list[Tensor]:
        """The output, and the gradients of q, k, v and of what is learned, from `probe` or the inputs' own."""
        out = self.forward(attend)
        leaves = (self.q, self.k, self.v, *learned_parameters(self.mechanism))
        gradients = torch.autograd.grad(
            out,
            leaves,
            self.probe if probe is None else probe,
            allow_unused=True,
            materialize_grads=True,
        )
        return [out.detach(), *gradients]

    def first_row(self) -> "Inputs":
        """The first sequence in float64."""
        row = copy.copy(self)
        row.q, row.k, row.v = (
            x[:1].detach().double().requires_grad_() for x in (self.q, self.k, self.v)
        )
        row.mechanism = copy.deepcopy(self.mechanism).double()
        ids = self.documents.ids
        row.documents = Documents(
            None if ids is None else ids[:1], self.documents.length, self.documents.device
        )
        return row


def with_unit_rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def learned_parameters(mechanism: Mechanism) -> list[nn.Parameter]:
    """What a mechanism learns, alone or with other layers."""
    modules = (mechanism, *shared_coefficients(mechanism))
    return [parameter for module in modules for parameter in module.parameters()]


def relative_errors(inputs: Inputs, attend: Attend) -> dict[str, float]:
    """Errors of the output, of the gradients of q, k, v, and of what is learned, against the formula in float64.

    The kernel computes all rows, the formula up to 16 blocks of 128 queries of the first row; elsewhere the gradient
    of the output is 0. An error is inf where a number is not finite.
    """
    queries = checked_queries(inputs.documents.length)
    index = torch.tensor([*chain(*queries)]).to(inputs.q.device)
    probe = torch.zeros_like(inputs.probe)
    probe[0, :, index] = inputs.probe[0, :, index]

    def formula(
        q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
    ) -> Tensor:
        def block(first: int, end: int) -> Tensor:
            weights = eager.logits(q, k, mechanism, documents, first, end).softmax(-1)
            return grouped_product(weights, v[..., :end, :])

        blocks = [checkpoint(block, span.start, span.stop, use_reentrant=False) for span in queries]
        return torch.cat(blocks, -2)

    out, *gradients = inputs.both(attend, probe)
    row = inputs.first_row()
    row_probe = probe[:1, :, index].double()
    expected_out, *expected = row.both(formula, row_probe)
    of_v = expected[2].norm()
    least = SMALLEST * probe.norm(dtype=torch.float64)

    errors = {"out": _norm_of_difference(out[:1, :, index], expected_out) / expected_out.norm()}
    for name, result, reference in zip("qkv", gradients, expected, strict=False):
        size = reference.norm()
        scale = torch.maximum(size, least) if size > NOTHING * of_v else of_v
        errors[name] = _norm_of_difference(result, reference) / scale
    if len(expected) > 3:
        sizes = size_of_parts(lambda signed: row.both(formula, signed)[4:], row_probe)
        for number, (result, reference, size) in enumerate(
            zip(gradients[3:], expected[3:], sizes, strict=True)
        ):
            errors[f"learned {number}"] = _norm_of_difference(result, reference) / size
    values = {name: error.item() for name, error in errors.items()}
    return {name: value if math.isfinite(value) else math.inf for name, value in values.items()}


def checked_queries(length: int) -> list[range]:
    """Blocks of queries, evenly spaced, the first and the last among them."""
    n_blocks = math.ceil(length / BLOCK)
    numbers = np.linspace(0, n_blocks - 1, min(n_blocks, MOST_BLOCKS)).round().astype(int).tolist()
    return [range(BLOCK * number, min(BLOCK * (number + 1), length)) for number in numbers]


def size_of_parts(gradients_of: Callable[[Tensor], list[Tensor]], probe: Tensor) -> list[Tensor]:
    """The size of what cancels in the gradients of learned numbers, by which their errors are judged.

    Such a gradient sums a part from each query, and the sum may be a hundredth of the parts. Its
    rounding errors are those of the parts, √Σ part² together. That is the root mean square of the
    gradient over random signs of the queries, of which this draws 8.

    Args:
        gradients_of: The gradients of all that is learned, for a gradient of the output.
        probe: The gradient of the output, (B, H, T, D).
    """
    generator = torch.Generator().manual_seed(0)
    squares: list[Tensor] = []
    for draw in range(SIGN_DRAWS):
        signs = torch.randint(0, 2, probe.shape[:-1], generator=generator) * 2 - 1
        gradients = gradients_of(probe * signs[..., None].to(probe))
        terms = [gradient.double().square().sum() for gradient in gradients]
        squares = terms if draw == 0 else [a + b for a, b in zip(squares, terms, strict=True)]
    return [(square / SIGN_DRAWS).sqrt() for square in squares]


def _norm_of_difference(result: Tensor, reference: Tensor) -> Tensor:
    """‖result − reference‖ in float64, where the reference is 0 in the rows that it does not have."""
    n_rows = len(reference)
    difference = (result[:n_rows].double() - reference).norm()
    return torch.hypot(difference, result[n_rows:].norm(dtype=torch.float64))


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is over its bound; None if nothing is."""
    over = {}
    for name, error in errors.items():
        bounds = LEARNED_BOUNDS if name.startswith("learned") else BOUNDS
        if not error <= bounds[dtype]:
            over[name] = error
    return f"relative error {max(over.values()):.1e} of {', '.join(over)}" if over else None


def random_documents(rows: int, length: int, mean: float | None, device: torch.device) -> Documents:
    """Documents of `mean` tokens on average, always the same ones; one a row if it is None."""
    if mean is None:
        return Documents(None, length, device)
    draws = torch.rand(rows, length, generator=torch.Generator().manual_seed(1))
    ids = (draws < 1 / mean).cumsum(1)
    starts = Documents(ids, length, torch.device("cpu")).cu_seqlens
    return Documents(ids.to(device), length, device, starts, int(starts.diff().max()))
