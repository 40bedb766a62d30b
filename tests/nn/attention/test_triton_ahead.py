"""Bounds of the resources of our kernels, compiled for capability 8.0 and 9.0 without a GPU.

The numbers are those of triton 3.9, loops rounded up to five. A kernel that needs less may lower
its bound.
"""

import functools

import pytest

from tests.nn.attention.ahead import SHARED, compile_kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

WIDTHS = (32, 64, 80, 96, 128, 256)
FAR_LOOPS = {
    (80, "forward"): (335, 405, 560, 560, 555, 760),
    (80, "backward_queries"): (360, 445, 335, 330, 325, 535),
    (80, "backward_keys"): (525, 655, 495, 495, 485, 385),
    (90, "forward"): (330, 375, 430, 430, 435, 440),
    (90, "backward_queries"): (350, 370, 295, 300, 295, 620),
    (90, "backward_keys"): (515, 550, 390, 390, 390, 840),
}
"""Instructions of the loop over far tiles, by `WIDTHS`, with a(t), m(t) and packed documents."""
NEAR_LOOPS = {
    (80, "forward"): (390, 460, 615, 615, 610, 765),
    (80, "backward_queries"): (415, 500, 365, 360, 360, 565),
    (80, "backward_keys"): (540, 700, 515, 515, 510, 390),
    (90, "forward"): (385, 430, 495, 495, 495, 455),
    (90, "backward_queries"): (405, 435, 320, 320, 320, 650),
    (90, "backward_keys"): (540, 580, 395, 395, 395, 845),
}
"""Instructions of the loop over near tiles."""
STACKS = {80: (0, 8, 0, 32, 32, 96), 90: (0, 168, 96, 96, 96, 536)}
"""Spilled bytes of a thread of any kernel, for heads of each of `WIDTHS`."""

SHARED_OF_WORKSTATIONS = 101_376
"""Bytes of shared memory that a program can have on compute capability 8.6, 8.9 and 12.0."""

capabilities = pytest.mark.parametrize("capability", SHARED)


@capabilities
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_half_precision_keeps_its_bounds(width, precision, capability) -> None:
    column = WIDTHS.index(width)
    n_more = 10 if precision == "float16" else 0

    for kernel, numbers in compiled(capability, width, "packed", precision).items():
        assert_fits(numbers, capability)
        far_bound = FAR_LOOPS[capability, kernel][column] + n_more
        near_bound = NEAR_LOOPS[capability, kernel][column] + n_more
        assert 0 < numbers["loop"] <= far_bound, kernel
        assert 0 < numbers["near"] <= near_bound, kernel
        assert numbers["stack"] <= STACKS[capability][column], kernel


@capabilities
@pytest.mark.parametrize("form", ["plain", "biases", "learned", "windowed"])
def test_every_form_fits(form, capability) -> None:
    for kernel, numbers in compiled(capability, 64, form, "bfloat16").items():
        assert_fits(numbers, capability)
        assert numbers["stack"] <= 200, kernel


@capabilities
def test_float32_fits_without_matrix_units(capability) -> None:
    for kernel, numbers in compiled(capability, 64, "packed", "float32").items():
        assert_fits(numbers, capability, has_units=False)
        assert numbers["stack"] <= 368, kernel


@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize("width", [128, 256])
def test_kernels_fit_workstations(width, capability) -> None:
    """RTX 4090 and L40S, RTX 5090: the blocks of an H100 are too large for them at D 256."""
    for kernel, numbers in compiled(capability, width, "learned", "bfloat16").items():
        assert 0 < numbers["shared"] <= SHARED_OF_WORKSTATIONS, kernel


@capabilities
@pytest.mark.parametrize("width", [64, 96, 128])
def test_heads_that_share_keys_take_what_single_heads_take(width, capability) -> None:
    """Each query head has a program for its dk and dv, so nothing is spilled between heads."""
    single = compiled(capability, width, "packed", "bfloat16", group=1)["backward_keys"]
    shared = compiled(capability, width, "packed", "bfloat16", group=4)["backward_keys"]

    assert shared["stack"] <= max(256, single["stack"])
    assert shared["near"] <= single["near"] + 5
    assert shared["loop"] <= single["loop"] + 5


@functools.cache
def compiled(
    capability: int, width: int, form: str, precision: str, group: int = 1
) -> dict[str, dict[str, int]]:
    """The numbers of each kernel, as `registers.py` prints them."""
    records = compile_kernels(
        "registers",
        capability=capability,
        width=width,
        form=form,
        precision=precision,
        group=group,
    )
    numbers_by_kernel = {record["kernel"]: record for record in records}
    assert [*numbers_by_kernel] == ["forward", "backward_queries", "backward_keys"]
    return numbers_by_kernel


def assert_fits(numbers: dict[str, int], capability: int, has_units: bool = True) -> None:
    """Check that a kernel has the shared memory that it needs, and the matrix units.

    Its products run in that capability's matrix units. There would be as many waits as wgmma if
    each wgmma waited for the wgmma before.
    """
    instruction = "HGMMA" if capability == 90 else "HMMA"
    assert numbers["shared"] <= SHARED[capability]
    assert (numbers[instruction] > 0) == has_units
    assert numbers["waits"] <= numbers["HGMMA"] // 2
