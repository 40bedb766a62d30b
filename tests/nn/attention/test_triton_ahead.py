"""Bounds of the resources of our kernels, compiled for capability 8.0 and 9.0 without a GPU.

The numbers are those of triton 3.9, loops rounded up to five. A kernel that needs less may lower
its bound.
"""

import functools
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

WIDTHS = (32, 64, 80, 96, 128, 256)
SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that one program can have: of an A100 and of an H100."""
LOOPS = {
    (80, "forward"): ((335, 405, 560, 560, 555, 760), (390, 460, 615, 615, 610, 765)),
    (80, "backward_queries"): ((360, 445, 335, 330, 325, 535), (415, 500, 365, 360, 360, 565)),
    (80, "backward_keys"): ((525, 655, 495, 495, 485, 385), (540, 700, 515, 515, 510, 390)),
    (90, "forward"): ((330, 375, 430, 430, 430, 440), (385, 425, 495, 495, 495, 455)),
    (90, "backward_queries"): ((350, 370, 295, 300, 295, 620), (405, 435, 320, 320, 320, 650)),
    (90, "backward_keys"): ((515, 550, 390, 390, 390, 840), (540, 580, 395, 395, 395, 845)),
}
"""Instructions of the loops over far and near tiles, with a(t), m(t) and packed documents, by
`WIDTHS`."""
STACKS = {80: (0, 8, 0, 32, 32, 96), 90: (0, 168, 96, 96, 96, 536)}
"""Spilled bytes of a thread of any kernel, for heads of each of `WIDTHS`."""

capabilities = pytest.mark.parametrize("capability", SHARED)


@capabilities
@pytest.mark.parametrize(("precision", "more"), [("bfloat16", 0), ("float16", 10)])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_half_precision_keeps_its_bounds(
    width, precision, more, capability
) -> None:
    column = WIDTHS.index(width)
    for kernel, taken in compiled(capability, width, "packed", precision).items():
        assert_fits(taken, capability)
        far, near = (bounds[column] + more for bounds in LOOPS[capability, kernel])
        assert 0 < taken["loop"] <= far, kernel
        assert 0 < taken["near"] <= near, kernel
        assert taken["stack"] <= STACKS[capability][column], kernel


@capabilities
@pytest.mark.parametrize("form", ["plain", "biases", "learned", "windowed", "float32"])
def test_every_form_fits(form, capability) -> None:
    """float32 has no matrix units."""
    kind = ("packed", "float32") if form == "float32" else (form, "bfloat16")
    for kernel, taken in compiled(capability, 64, *kind).items():
        assert_fits(taken, capability, has_units=form != "float32")
        assert taken["stack"] <= (368 if form == "float32" else 200), kernel


@capabilities
@pytest.mark.parametrize("width", [64, 96, 128])
def test_heads_that_share_keys_take_what_single_heads_take(width, capability) -> None:
    """Each query head has a program for its dk and dv, so nothing is spilled between heads."""
    own, shared = (
        compiled(capability, width, "packed", "bfloat16", group)["backward_keys"]
        for group in (1, 4)
    )
    assert shared["stack"] <= max(256, own["stack"])
    assert all(shared[loop] <= own[loop] + 5 for loop in ("near", "loop"))


@functools.cache
def compiled(
    capability: int, width: int, form: str, precision: str, group: int = 1
) -> dict[str, dict[str, int]]:
    """What each kernel takes, as `registers.py` prints it: names and numbers, by kernel.

    In a process of its own, because the interpreter may have replaced the compiler in this one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = {
        "capability": capability,
        "width": width,
        "form": form,
        "precision": precision,
        "group": group,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.nn.attention.registers", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert [row[4] for row in rows] == ["forward", "backward_queries", "backward_keys"]
    return {row[4]: dict(zip(row[6::2], map(int, row[7::2]), strict=True)) for row in rows}


def assert_fits(taken: dict[str, int], capability: int, has_units: bool = True) -> None:
    """It has the shared memory that it needs.

    Its products run in that capability's matrix units, and not one by one.

    If ptxas has to let each wgmma wait for the one before, there are as many waits as wgmma.
    """
    assert taken["shared"] <= SHARED[capability]
    assert (taken["HGMMA" if capability == 90 else "HMMA"] > 0) == has_units
    assert taken["waits"] <= taken["HGMMA"] // 2
