"""Compares any kernel with the readable kernel in float64: bounds, and inputs of all kinds."""

import copy
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import ALiBi, SlidingWindow
from anlit.benchmarks.attention_check import (
    BOUNDS,
    LEARNED_BOUNDS,
    NEGLIGIBLE,
    learned_parameters,
    size_of_terms,
)
from anlit.nn.kernels import eager
from anlit.nn.kernels.documents import Documents
from anlit.nn.mechanisms.coefficient import Coefficient
from anlit.nn.mechanisms.mechanism import Mechanism
from tests.nn.attention.examples import SHIPPED, LogNWithSlopes


class Straight(Mechanism):
    """a(t) = 1 + s·t/64 and m(t) = −s·2^{−h}·t for head h, s learned per head: straight lines."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Coefficient(0.7, "per_head")

    def distance_gain(self, t: Tensor) -> Tensor:
        return 1 + self.slope() * t / 64

    def distance_bias(self, t: Tensor) -> Tensor:
        heads = torch.arange(1, self.n_heads + 1, device=t.device)[:, None]
        return -self.slope() * 2.0**-heads * t


MECHANISMS: dict[str, Mechanism] = {
    **SHIPPED,
    "a user's": LogNWithSlopes(),
    "straight": Straight(),
    "window of one": SlidingWindow(1),
    "window, alibi": SlidingWindow(6, ALiBi()),
}

FLASH = ("plain", "log n", "window", "window of one", "window, log n", "alibi", "window, alibi")
"""Mechanisms that flash attention can compute."""

ONE_COEFFICIENT = [name for name in MECHANISMS if name != "a user's"]
"""Mechanisms that our Triton kernels compute: a(t) and m(t) have at most one coefficient."""

BY_DISTANCE = [
    name for name in ONE_COEFFICIENT if MECHANISMS[name].for_layer(1, 8, 0).depends_on_distance
]
WITHOUT_GAIN = ["plain", "log n", *BY_DISTANCE]
"""Mechanisms for kernels that get the product of g(n) and q: all g(n) are alike to them."""

WIDTHS = [32, 64, 80, 96, 128, 256]

kinds = pytest.mark.parametrize("kind", ["dense", "documents", "window"])
packings = pytest.mark.parametrize("kind", ["dense", "documents"])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slow_except(fast_names: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test, marked as slow except for `fast_names`."""
    parameters = []
    for name in names:
        marks = () if name in fast_names else pytest.mark.slow
        parameters.append(pytest.param(name, marks=marks))
    return parameters


def inputs(
    *shape: int, dtype: torch.dtype = torch.float32, n_heads_kv: int | None = None
) -> list[Tensor]:
    """q, k, v and weights of the output, (B, H or G, T, D), in the projections' layout."""
    B, H, T, D = shape
    G = n_heads_kv or H
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for n_heads in (H, G, G, H):
        x = torch.randn(B, T, n_heads, D, generator=generator, dtype=torch.float64)
        tensors.append(x.to(dtype).transpose(1, 2))
    return tensors


def packed(batch: int, length: int, kind: str, device: str = "cpu") -> Documents:
    ids = None
    if kind == "documents":
        generator = torch.Generator().manual_seed(length)
        is_start = torch.rand(batch, length, generator=generator) < 0.12
        middle = length // 2
        is_start[:, middle : middle + 3] = True  # documents of a single token
        ids = is_start.long().cumsum(1).to(device)
    return Documents(ids, length, torch.device(device))


def gradients(
    attend, mechanism: Mechanism, tensors: list[Tensor], documents: Documents
) -> dict[str, Tensor]:
    """The output, and the gradients of q, k, v and the vector of all learned coefficients."""
    *qkv, probe = tensors
    q, k, v = [x.detach().requires_grad_() for x in qkv]
    learned = learned_parameters(mechanism)
    output = attend(q, k, v, mechanism, documents, 0.0)
    dq, dk, dv, *d_learned = torch.autograd.grad(output, (q, k, v, *learned), probe)
    result = {"output": output.detach(), "q": dq, "k": dk, "v": dv}
    if d_learned:
        result["learned"] = torch.cat([gradient.flatten() for gradient in d_learned])
    return {name: x.double().cpu() for name, x in result.items()}


def assert_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    learned_size: float | None = None,
) -> None:
    """Check that all errors are within their bounds, relative to the reference.

    The error of learned coefficients is relative to `learned_size`.
    """
    assert actual.keys() == expected.keys()
    size_of_dv = expected["v"].norm()
    for name, reference in expected.items():
        scale = reference.norm()
        bound = BOUNDS[dtype]
        if name == "learned" and learned_size is not None:
            scale = learned_size
            bound = LEARNED_BOUNDS[dtype]
        elif scale < NEGLIGIBLE * size_of_dv:
            # A query that sees a single key gives q and k no gradient.
            scale = size_of_dv
        error = (actual[name] - reference).norm() / scale
        assert error <= bound, f"{name}: relative error {error:.1e}, more than {bound:.0e}"


assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
"""For numbers in float64."""


def repeated(attend: Any) -> Any:
    """`attend` with keys and values copied for each head: head h of H gets head h // (H/G)."""

    def attend_repeated(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        H = q.shape[1]
        G = k.shape[1]
        index = torch.arange(H) * G // H
        return attend(q, k[:, index], v[:, index], *settings)

    return attend_repeated


def windowed(mechanism: Mechanism, kind: str) -> Mechanism:
    """The mechanism, with a window of 11 keys for `window` unless it has a window."""
    has_window = mechanism.for_layer(1, 8, 0).window is not None
    if kind == "window" and not has_window:
        return SlidingWindow(11, mechanism)
    return mechanism


def check(
    kernel: Any,
    name: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Compare `kernel` with the readable kernel in float64, both on numbers that `dtype` rounds."""
    B, H, T, D = shape
    mechanism = layer_of(name, kind, H, D).float().to(device)
    reference = layer_of(name, kind, H, D).double()
    tensors = inputs(*shape, dtype=dtype)
    wide_tensors = [x.double() for x in tensors]
    documents = packed(B, T, kind)

    expected = gradients(eager.attend, reference, wide_tensors, documents)
    learned_size = None
    if "learned" in expected:
        learned_size = size_of_learned_gradients(reference, wide_tensors, documents)
    tensors_on_device = [x.to(device) for x in tensors]
    documents_on_device = packed(B, T, kind, device)
    actual = gradients(kernel.attend, mechanism, tensors_on_device, documents_on_device)

    assert_close(actual, expected, dtype, learned_size)


def layer_of(name: str, kind: str, n_heads: int, d_head: int) -> Mechanism:
    """A layer's mechanism, from a copy: a shared coefficient takes the dtype of a layer."""
    mechanism = copy.deepcopy(MECHANISMS[name])
    return windowed(mechanism, kind).for_layer(n_heads, d_head, 0)


def size_of_learned_gradients(
    mechanism: Mechanism, tensors: list[Tensor], documents: Documents
) -> float:
    """The norm of the gradients' terms, before terms of different sign cancel."""
    *qkv, probe = tensors

    def learned_gradients(signed_probe: Tensor) -> list[Tensor]:
        output = eager.attend(*qkv, mechanism, documents, 0.0)
        return list(torch.autograd.grad(output, learned_parameters(mechanism), signed_probe))

    sizes = torch.stack(size_of_terms(learned_gradients, probe))
    return sizes.norm().item()
