"""FlexAttention's kernels for a(t) and m(t), compiled for capability 8.0 and 9.0 without a GPU."""

import functools
from typing import Any

import pytest

from tests.nn.attention.ahead import SHARED, compile_kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

STACK = 2_000
"""Spilled bytes of a thread. A kernel with a single stage and PyTorch's own tiles spills 6,280."""

capabilities = pytest.mark.parametrize("capability", SHARED)


@capabilities
@pytest.mark.parametrize("form", ["fixed", "documents"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_scale_invariant_attention_fits(width, form, capability) -> None:
    """PyTorch's own options take 376,832 bytes at D 64, as on an H200."""
    for kernel in compiled(form, width):
        if kernel["capability"] == capability:
            assert 0 < kernel["shared"] <= SHARED[capability]
            assert kernel["stack"] <= STACK


@pytest.mark.parametrize(
    ("form", "width"),
    [
        ("window", 80),
        ("heads", 64),
    ],
)
def test_windows_and_tables_per_head_fit(form, width) -> None:
    for kernel in compiled(form, width):
        assert 0 < kernel["shared"] <= SHARED[kernel["capability"]]


@functools.cache
def compiled(form: str, width: int) -> list[dict[str, Any]]:
    """The numbers of each of the four kernels, as `flex_memory.py` prints them."""
    records = compile_kernels("flex_memory", form=form, width=width)
    kernels = [record["kernel"] for record in records]
    assert kernels == ["forward", "backward", "forward", "backward"]
    return records
