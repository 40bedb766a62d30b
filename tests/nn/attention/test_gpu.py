"""Kernels that need a GPU against the formula in float64, as in test_cpu_kernels.py.

Triton's interpreter computes our own kernels on a CPU too (test_triton.py); flash and flex have
their own files.
"""

from itertools import product

import pytest
import torch

from anlit.nn.kernels import KERNELS
from tests.nn.attention.kernels import (
    FLASH,
    MECHANISMS,
    WIDTHS,
    WITHOUT_GAIN,
    check,
    gradients,
    inputs,
    packed,
)

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)
PACKINGS = ("dense", "documents")
KINDS = (*PACKINGS, "window")
CASES = [
    # Few of flex, because each needs a compilation.
    ("flex", "plain", "dense", 64, torch.bfloat16),
    ("flex", "scale-invariant, c per layer", "dense", 128, torch.bfloat16),
    ("flex", "scale-invariant, c per layer", "documents", 64, torch.bfloat16),
    ("flex", "a user's", "documents", 64, torch.bfloat16),
    ("flex", "window, scale-invariant", "documents", 80, torch.bfloat16),
    ("flex", "log bias", "dense", 32, torch.float16),
    ("flex", "scale-invariant", "documents", 256, torch.float16),
    *product(["flash"], FLASH, PACKINGS, [64], HALF),
    *product(["flash"], ["log n"], PACKINGS, WIDTHS, HALF),
    *product(["triton"], WITHOUT_GAIN, KINDS, [64], DTYPES),
    *product(["triton"], ["scale-invariant, c per layer"], KINDS, WIDTHS, DTYPES),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "name", "kind", "width", "dtype"), CASES, ids=str)
def test_it_is_the_formula(kernel, name, kind, width, dtype) -> None:
    q = torch.empty(1, 2, 1, width, dtype=dtype, device="cuda")
    layer = MECHANISMS[name].for_layer(2, width, 0)
    reason = KERNELS[kernel].unsupported_reason(layer, q)
    if reason:
        pytest.skip(reason)
    length = 150 + sum(map(ord, name + kind)) % 100
    shape = (2, 2, length, width)

    check(KERNELS[kernel], name, kind, shape, dtype, "cuda")


@pytest.mark.gpu
def test_triton_gives_the_same_bits_twice() -> None:
    attend = KERNELS["triton"].attend
    shape = (2, 3, 1000, 64)
    tensors = [x.cuda() for x in inputs(*shape, dtype=torch.bfloat16)]
    mechanism = MECHANISMS["scale-invariant, c per layer"].for_layer(3, 64, 0).cuda()
    documents = packed(2, 1000, "documents", "cuda")

    first = gradients(attend, mechanism, tensors, documents)
    second = gradients(attend, mechanism, tensors, documents)

    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
