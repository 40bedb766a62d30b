"""QK-norm and RoPE in the code of a Hopper GPU, written without one."""

import pytest

pytest.importorskip("triton")
from tests.nn.models.rotary_memory import D_MODEL, count, vector_bytes

pytestmark = pytest.mark.slow

TABLES_AND_NORMS = 0.05
"""cos, sin and norms, over the bytes of q, k and their gradients. Packed documents have tables per
row, so more of them."""


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("architecture", ["GPT", "AnGPT"])
def test_q_and_k_are_read_and_written_once(architecture, width) -> None:
    """Forward reads and writes q and k. Backward also reads the gradients by the results."""
    passes = count(architecture, width, fraction=0.5, is_packed=False)

    assert passes["forward"].n_bytes < (1 + TABLES_AND_NORMS) * 4 * vector_bytes()
    assert passes["backward"].n_bytes < (1 + TABLES_AND_NORMS) * 6 * vector_bytes()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_kernel_loads_few_parts_of_q_and_k(fraction) -> None:
    """x, its partner, cos, sin and two gains. Parts of x with masks were 13 loads."""
    passes = count("GPT", 64, fraction, is_packed=False)

    assert passes["forward"].loads == [6]
    assert passes["backward"].n_bytes < (1 + TABLES_AND_NORMS) * 6 * vector_bytes()


@pytest.mark.parametrize("width", [64, 128])
def test_packed_documents_add_the_reads_of_their_tables(width) -> None:
    tables = 2 * 2 * vector_bytes() * 2 * width / D_MODEL  # of q and k, in float32 for one head

    passes = count("GPT", width, fraction=0.5, is_packed=True)

    assert passes["forward"].n_bytes < (1 + TABLES_AND_NORMS) * 4 * vector_bytes() + tables
    assert passes["backward"].n_bytes < (1 + TABLES_AND_NORMS) * 6 * vector_bytes() + tables


def test_ngpt_normalises_and_rotates_in_one_pass() -> None:
    """The gradient of s_qk needs two more passes over dq, dk and the rotated q and k."""
    passes = count("NGPT", 64, fraction=0.5, is_packed=False)

    assert passes["backward"].n_bytes < (1 + TABLES_AND_NORMS) * 10 * vector_bytes()
