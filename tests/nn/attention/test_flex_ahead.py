"""FlexAttention's kernels for a(t) and m(t), compiled for capability 8.0 and 9.0 without a GPU."""

import functools
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that one program can have: of an A100 and of an H100."""
STACK = 2_000
"""Spilled bytes of a thread. With one stage and PyTorch's own tiles a kernel spills 6,280."""

capabilities = pytest.mark.parametrize("capability", SHARED)


@capabilities
@pytest.mark.parametrize("form", ["fixed", "documents"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_scale_invariant_attention_fits(width, form, capability) -> None:
    """Without the options of `flex.table_options` it takes 376,832 bytes at D 64, as on an H200."""
    for kernel in compiled(form, width):
        if kernel["capability"] == capability:
            assert 0 < kernel["shared"] <= SHARED[capability]
            assert kernel["stack"] <= STACK


@pytest.mark.parametrize(("form", "width"), [("window", 80), ("heads", 64)])
def test_windows_and_tables_per_head_fit(form, width) -> None:
    for kernel in compiled(form, width):
        assert 0 < kernel["shared"] <= SHARED[kernel["capability"]]


@functools.cache
def compiled(form: str, width: int) -> list[dict[str, int]]:
    """What each of the four kernels takes, as `flex_memory.py` prints it: names and numbers.

    In a process of its own, because the interpreter may have replaced the compiler in this one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = ["--form", form, "--width", str(width)]
    command = [sys.executable, "-m", "tests.nn.attention.flex_memory", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert [row[4] for row in rows] == 2 * ["forward", "backward"]
    kernels = []
    for capability, _, _, _, _, *numbers in rows:
        kernel = dict(zip(numbers[::2], map(int, numbers[1::2]), strict=True))
        kernel["capability"] = int(capability.removeprefix("sm_"))
        kernels.append(kernel)
    return kernels
