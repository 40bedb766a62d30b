"""Our kernels compiled ahead of time for compute capability 8.0 and 9.0, without a GPU: what they take, by bounds.

The numbers are those of triton 3.9 when they were entered, loops rounded up to five. A kernel that needs less may lower
its bound.
"""

import functools
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

KERNELS = ("forward", "backward_queries", "backward_keys")
WIDTHS = (32, 64, 80, 96, 128, 256)
SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that one program can have: of an A100 and of an H100."""

FAR = {
    (80, "forward"): (335, 405, 560, 560, 555, 760),
    (80, "backward_queries"): (360, 445, 335, 330, 325, 535),
    (80, "backward_keys"): (525, 655, 495, 495, 485, 385),
    (90, "forward"): (330, 375, 430, 430, 430, 440),
    (90, "backward_queries"): (350, 370, 295, 300, 295, 620),
    (90, "backward_keys"): (515, 550, 390, 390, 390, 840),
}
NEAR = {
    (80, "forward"): (390, 460, 615, 615, 610, 765),
    (80, "backward_queries"): (415, 500, 365, 360, 360, 565),
    (80, "backward_keys"): (540, 700, 515, 515, 510, 390),
    (90, "forward"): (385, 425, 495, 495, 495, 455),
    (90, "backward_queries"): (405, 435, 320, 320, 320, 650),
    (90, "backward_keys"): (540, 580, 395, 395, 395, 845),
}
"""Instructions of the loops over far and near tiles, with a(t), m(t) and packed documents, by `WIDTHS`."""
STACKS = {80: (0, 8, 0, 32, 32, 96), 90: (0, 168, 96, 96, 96, 536)}
"""Spilled bytes of a thread of any kernel, for heads of each of `WIDTHS`."""

capabilities = pytest.mark.parametrize("capability", SHARED)


@capabilities
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_fits_and_keeps_its_bounds(width, capability) -> None:
    column = WIDTHS.index(width)
    for kernel, taken in compiled(capability, width, "packed", "bfloat16").items():
        assert_fits(taken, capability)
        assert taken["stack"] <= STACKS[capability][column], kernel
        assert 0 < taken["loop"] <= FAR[capability, kernel][column], kernel
        assert 0 < taken["near"] <= NEAR[capability, kernel][column], kernel


@capabilities
@pytest.mark.parametrize(
    ("width", "form", "precision", "stack"),
    [
        *[(64, form, "bfloat16", 200) for form in ("plain", "biases", "learned", "windowed")],
        *[(width, "packed", "float16", None) for width in (64, 128)],
        (64, "packed", "float32", 368),
    ],
)
def test_every_form_and_precision_fits(width, form, precision, stack, capability) -> None:
    """float16 keeps the bounds of bfloat16; float32 has no matrix units."""
    for kernel, taken in compiled(capability, width, form, precision).items():
        if precision == "float32":
            assert taken["shared"] <= SHARED[capability], kernel
        else:
            assert_fits(taken, capability)
        if stack is not None:
            assert taken["stack"] <= stack, kernel
        else:
            assert taken["loop"] <= FAR[capability, kernel][WIDTHS.index(width)] + 10, kernel


@capabilities
@pytest.mark.parametrize("width", [64, 96, 128])
def test_heads_that_share_keys_take_what_single_heads_take(width, capability) -> None:
    """Each query head's part of dk and dv has a program of its own, so nothing is spilled between heads."""
    own, shared = (compiled(capability, width, "packed", "bfloat16", group)["backward_keys"] for group in (1, 4))
    assert shared["stack"] <= max(256, own["stack"])
    assert shared["near"] <= own["near"] + 5
    assert shared["loop"] <= own["loop"] + 5


@functools.cache
def compiled(capability: int, width: int, form: str, precision: str, group: int = 1) -> dict[str, dict[str, int]]:
    """What each kernel takes, as `registers.py` prints it: names and numbers, by kernel.

    In a process of its own, because the interpreter may have replaced the compiler in this one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = {"capability": capability, "width": width, "form": form, "precision": precision, "group": group}
    command = [sys.executable, "-m", "tests.attention.registers", "--kernel", *KERNELS]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert [row[4] for row in rows] == list(KERNELS)
    return {row[4]: dict(zip(row[6::2], map(int, row[7::2]), strict=True)) for row in rows}


def assert_fits(taken: dict[str, int], capability: int) -> None:
    """It has the shared memory that it needs; its products run in that capability's matrix units, and not one by one.

    If ptxas has to let each wgmma wait for the one before, there are as many waits as wgmma.
    """
    assert taken["shared"] <= SHARED[capability]
    assert taken["HGMMA" if capability == 90 else "HMMA"] > 0
    assert taken["waits"] <= taken["HGMMA"] // 2
