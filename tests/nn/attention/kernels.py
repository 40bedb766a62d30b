"""Any kernel against the readable kernel in float64: bounds, and inputs of every kind."""

import copy
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
    """a(t) = 1 + s·t/64 and m(t) = −s·2^{−h}·t for head h, s learned per head: straight at every distance."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Coefficient(0.7, "per_head")

    def distance_gain(self, t: Tensor) -> Tensor:
        return 1 + self.slope() * t / 64

    def distance_bias(self, t: Tensor) -> Tensor:
        return (
            -self.slope() * 2.0 ** -torch.arange(1, self.n_heads + 1, device=t.device)[:, None] * t
        )


MECHANISMS: dict[str, Mechanism] = {
    **SHIPPED, "of one's own": LogNWithSlopes(), "straight": Straight(), "window of one": SlidingWindow(1),
    "window, alibi": SlidingWindow(6, ALiBi()),
}  # fmt: skip
FLASH = ("plain", "log n", "window", "window of one", "window, log n", "alibi", "window, alibi")
"""Mechanisms that flash attention can compute."""
ONE_COEFFICIENT = [name for name in MECHANISMS if name != "of one's own"]
"""The mechanisms whose a(t) and m(t) learn one coefficient at most, as our Triton kernels need it."""
WIDTHS = [32, 64, 80, 96, 128, 256]

kinds = pytest.mark.parametrize("kind", ["dense", "documents", "window"])
packings = pytest.mark.parametrize("kind", ["dense", "documents"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def inputs(*shape: int, dtype: torch.dtype, n_heads_kv: int | None = None) -> list[Tensor]:
    """q, k, v and weights for a scalar of the output, (B, H or H_kv, T, D), as the projections leave them."""
    B, H, T, D = shape
    heads = (H, n_heads_kv or H, n_heads_kv or H, H)
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, T, h, D, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for h in heads
    ]


def packed(batch: int, length: int, kind: str, device: str = "cpu") -> Documents:
    ids = None
    if kind == "documents":
        starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.12
        starts[:, length // 2 : length // 2 + 3] = True  # documents of one token
        ids = starts.long().cumsum(1).to(device)
    return Documents(ids, length, torch.device(device))


def gradients(
    attend, mechanism: Mechanism, tensors: list[Tensor], documents: Documents
) -> dict[str, Tensor]:
    """The output and the gradients of q, k, v and of what the mechanism learns, all of them in one vector."""
    *qkv, probe = tensors
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    output = attend(q, k, v, mechanism, documents, 0.0)
    dq, dk, dv, *others = torch.autograd.grad(
        output, (q, k, v, *learned_parameters(mechanism)), probe
    )
    result = {"output": output.detach(), "q": dq, "k": dk, "v": dv}
    if others:
        result["learned"] = torch.cat([gradient.flatten() for gradient in others])
    return {name: x.double().cpu() for name, x in result.items()}


def assert_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    learned_size: float | None = None,
) -> None:
    """Every entry is within its bound, relative to the reference; what is learned relative to `learned_size`."""
    assert actual.keys() == expected.keys()
    of_v = expected["v"].norm()
    for name, reference in expected.items():
        size = reference.norm()
        if name == "learned" and learned_size is not None:
            scale, bound = learned_size, LEARNED_BOUNDS[dtype]
        elif size < NEGLIGIBLE * of_v:  # a query that sees one key gives q and k no gradient
            scale, bound = of_v, BOUNDS[dtype]
        else:
            scale, bound = size, BOUNDS[dtype]
        error = (actual[name] - reference).norm() / scale
        assert error <= bound, f"{name}: relative error {error:.1e}, more than {bound:.0e}"


assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
"""Every number, in float64."""


def repeated(attend: Any) -> Any:
    """`attend` with a copy of the keys and values for each head: head h of H gets those of h // (H/G)."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        index = [h * k.shape[1] // q.shape[1] for h in range(q.shape[1])]
        return attend(q, k[:, index], v[:, index], *rest)

    return run


def windowed(mechanism: Mechanism, kind: str) -> Mechanism:
    """The mechanism, for inputs of kind `window` inside a window of 11 keys unless it has one."""
    has_one = mechanism.for_layer(1, 8, 0).window is not None
    return SlidingWindow(11, mechanism) if kind == "window" and not has_one else mechanism


def check(
    kernel: Any,
    name: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """`kernel` against the readable one in float64, both with the numbers as `dtype` rounds them."""
    B, H, T, D = shape
    mechanism, reference = (
        # a copy, because a coefficient that layers share is the template's, and changes dtype with them
        windowed(copy.deepcopy(MECHANISMS[name]), kind).for_layer(H, D, 0)
        for _ in range(2)
    )
    tensors = inputs(*shape, dtype=dtype)
    wide = [x.double() for x in tensors]
    documents = packed(B, T, kind)
    reference.double()
    expected = gradients(eager.attend, reference, wide, documents)
    learned_size = None
    if "learned" in expected:
        *qkv, probe = wide
        sizes = size_of_terms(
            lambda signed: learned_gradients(eager.attend, reference, [*qkv, signed], documents),
            probe,
        )
        learned_size = torch.stack(sizes).norm().item()
    on_device = [x.to(device) for x in tensors]
    actual = gradients(
        kernel.attend, mechanism.float().to(device), on_device, packed(B, T, kind, device)
    )
    assert_close(actual, expected, dtype, learned_size)


def learned_gradients(
    attend: Any, mechanism: Mechanism, tensors: list[Tensor], documents: Documents
) -> list[Tensor]:
    """The gradients of what the mechanism learns, alone."""
    *qkv, probe = tensors
    output = attend(*qkv, mechanism, documents, 0.0)
    return list(torch.autograd.grad(output, learned_parameters(mechanism), probe))
