"""Compares a kernel's output and gradients on random inputs with the formula in float64."""

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
"""Queries in a checked block."""
MAX_BLOCKS = 16
"""Checked blocks at most, evenly spaced over the first row."""

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""Largest ‖x − reference‖/‖reference‖ of the output and of the gradients of q, k and v."""
LEARNED_BOUNDS = {
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.float32: 3e-5,
    torch.float64: 1e-10,
}
"""The same for learned numbers, over the size of the terms in their gradients (`size_of_terms`)."""
SMALLEST = 1e-3
"""A reference below 1e-3 of the norm of the output's gradient counts as this large. Over 65,536
keys the gradients of q and k are about 4 times as large."""
NEGLIGIBLE = 1e-9
"""A reference below 1e-9 of the norm of v's gradient counts as 0. An example is q and k if every
query sees a single key. The error is then relative to the gradient of v."""
SIGN_DRAWS = 8

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]
"""A kernel: q, k, v, mechanism, documents, dropout → output (B, H, T, D)."""


class Inputs:
    """Random q, k, v and `probe`, the gradient of the output.

    They are stored (B, T, H or G, D) and viewed (B, H or G, T, D). The root mean square of q and k
    is 1.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        documents: Documents,
        rows: int,
        heads: int,
        key_heads: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        device = documents.device
        generator = torch.Generator(device).manual_seed(0)

        def draw(n_heads: int) -> Tensor:
            shape = (rows, documents.length, n_heads, width)
            return torch.randn(*shape, generator=generator, device=device).transpose(1, 2)

        q = draw(heads)
        k = draw(key_heads)
        v = draw(key_heads)
        probe = draw(heads)
        self.q = with_unit_rms(q).to(dtype).requires_grad_()
        self.k = with_unit_rms(k).to(dtype).requires_grad_()
        self.v = v.to(dtype).requires_grad_()
        self.probe = probe.to(dtype)
        self.mechanism = mechanism.to(device)
        self.documents = documents

    def forward(self, attend: Attend) -> Tensor:
        return attend(self.q, self.k, self.v, self.mechanism, self.documents, 0.0)

    def both(self, attend: Attend, probe: Tensor | None = None) -> list[Tensor]:
        """Return the output and the gradients of q, k, v and all learned parameters.

        Args:
            attend: The kernel.
            probe: The gradient of the output, by default `self.probe`.
        """
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
        """Return the first sequence in float64."""
        row = copy.copy(self)
        row.q = _first_row_of(self.q)
        row.k = _first_row_of(self.k)
        row.v = _first_row_of(self.v)
        row.mechanism = copy.deepcopy(self.mechanism).double()
        ids = self.documents.ids
        first_ids = None if ids is None else ids[:1]
        row.documents = Documents(first_ids, self.documents.length, self.documents.device)
        return row


def _first_row_of(x: Tensor) -> Tensor:
    return x[:1].detach().double().requires_grad_()


def with_unit_rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def learned_parameters(mechanism: Mechanism) -> list[nn.Parameter]:
    """Return all parameters of a mechanism, including the shared ones."""
    parameters = list(mechanism.parameters())
    for coefficient in shared_coefficients(mechanism):
        parameters += coefficient.parameters()
    return parameters


def relative_errors(inputs: Inputs, attend: Attend) -> dict[str, float]:
    """Compare the output and all gradients of a kernel with the formula in float64.

    The kernel computes all rows, the formula up to 16 blocks of 128 queries in the first row. The
    gradient of the output is 0 everywhere else. An error is inf if a number is not finite.

    Returns:
        `out`, `q`, `k`, `v`, and `learned 0`, `learned 1`, … for each learned parameter.
    """
    queries = checked_queries(inputs.documents.length)
    index = torch.tensor([*chain(*queries)]).to(inputs.q.device)
    probe = torch.zeros_like(inputs.probe)
    probe[0, :, index] = inputs.probe[0, :, index]
    row_probe = probe[:1, :, index].double()

    def formula(
        q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
    ) -> Tensor:
        def attend_block(first: int, end: int) -> Tensor:
            weights = eager.logits_of_queries(q, k, mechanism, documents, first, end).softmax(-1)
            return grouped_product(weights, v[..., :end, :])

        blocks = []
        for span in queries:
            blocks.append(checkpoint(attend_block, span.start, span.stop, use_reentrant=False))
        return torch.cat(blocks, -2)

    out, *gradients = inputs.both(attend, probe)
    row = inputs.first_row()
    expected_out, *expected = row.both(formula, row_probe)
    v_norm = expected[2].norm()
    smallest = SMALLEST * probe.norm(dtype=torch.float64)

    errors = {"out": _norm_of_difference(out[:1, :, index], expected_out) / expected_out.norm()}
    for name, gradient, reference in zip("qkv", gradients, expected, strict=False):
        norm = reference.norm()
        scale = torch.maximum(norm, smallest) if norm > NEGLIGIBLE * v_norm else v_norm
        errors[name] = _norm_of_difference(gradient, reference) / scale
    if len(expected) > 3:
        sizes = size_of_terms(lambda signed: row.both(formula, signed)[4:], row_probe)
        learned = zip(gradients[3:], expected[3:], sizes, strict=True)
        for number, (gradient, reference, size) in enumerate(learned):
            errors[f"learned {number}"] = _norm_of_difference(gradient, reference) / size
    return {name: _finite_or_inf(error.item()) for name, error in errors.items()}


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def checked_queries(length: int) -> list[range]:
    """Return evenly spaced blocks of queries, with the first and the last block."""
    n_blocks = math.ceil(length / BLOCK)
    n_checked = min(n_blocks, MAX_BLOCKS)
    numbers = np.linspace(0, n_blocks - 1, n_checked).round().astype(int).tolist()
    blocks = []
    for number in numbers:
        first = BLOCK * number
        blocks.append(range(first, min(first + BLOCK, length)))
    return blocks


def size_of_terms(gradients_of: Callable[[Tensor], list[Tensor]], probe: Tensor) -> list[Tensor]:
    """Return √Σ term² for the gradient of each learned number, the scale of its rounding errors.

    The gradient of a learned number sums one term per query. The terms may cancel to a hundredth of
    their size. Their rounding errors do not cancel. √Σ term² is the root mean square of the
    gradient over random signs of the queries. This estimate draws 8 of them.

    Args:
        gradients_of: Returns the gradients of all learned numbers for a gradient of the output.
        probe: The gradient of the output, (B, H, T, D).
    """
    generator = torch.Generator().manual_seed(0)
    sums: list[Tensor] = []
    for _ in range(SIGN_DRAWS):
        signs = torch.randint(0, 2, probe.shape[:-1], generator=generator) * 2 - 1
        gradients = gradients_of(probe * signs[..., None].to(probe))
        squares = [gradient.double().square().sum() for gradient in gradients]
        if sums:
            squares = [a + b for a, b in zip(sums, squares, strict=True)]
        sums = squares
    return [(total / SIGN_DRAWS).sqrt() for total in sums]


def _norm_of_difference(result: Tensor, reference: Tensor) -> Tensor:
    """Return ‖result − reference‖ in float64. Rows that the reference lacks count as 0 in it."""
    n_rows = len(reference)
    difference = (result[:n_rows].double() - reference).norm()
    return torch.hypot(difference, result[n_rows:].norm(dtype=torch.float64))


def fault_of(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """Return which errors exceed their bounds, None if no error does."""
    excessive = {}
    for name, error in errors.items():
        bounds = LEARNED_BOUNDS if name.startswith("learned") else BOUNDS
        if not error <= bounds[dtype]:
            excessive[name] = error
    if not excessive:
        return None
    return f"relative error {max(excessive.values()):.1e} of {', '.join(excessive)}"


def random_documents(rows: int, length: int, mean: float | None, device: torch.device) -> Documents:
    """Return documents of random lengths, the same in every call.

    Args:
        rows: Sequences in the batch.
        length: Tokens in a sequence.
        mean: Mean tokens in a document. None makes each row one document.
        device: The device of the result.
    """
    if mean is None:
        return Documents(None, length, device)
    draws = torch.rand(rows, length, generator=torch.Generator().manual_seed(1))
    ids = (draws < 1 / mean).cumsum(1)
    starts = Documents(ids, length, torch.device("cpu")).cu_seqlens
    return Documents(ids.to(device), length, device, starts, int(starts.diff().max()))
