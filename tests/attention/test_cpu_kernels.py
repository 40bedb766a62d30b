"""The back ends that run on a CPU against the readable one in float64, on memory full of NaN."""

import pytest
import torch

from anlit.attention.backends import blockwise, eager, sdpa
from tests.attention.kernels import MECHANISMS, WIDTHS, check, dtypes, kinds

pytestmark = pytest.mark.usefixtures("poison")
BACKENDS = {"eager": eager, "sdpa": sdpa, "blockwise": blockwise}
ABLE = [(b, name) for b in BACKENDS for name in MECHANISMS if BACKENDS[b].unsupported_reason(MECHANISMS[name]) is None]


def some_length(*names: str) -> int:
    """Of one to three blocks of 64, none of them full at the end."""
    number = sum(map(ord, "".join(names)))
    return 64 * (number % 3) + 1 + number % 63


@kinds
@pytest.mark.parametrize(("backend", "name"), ABLE)
def test_every_mechanism_is_the_reference(backend, name, kind) -> None:
    check(BACKENDS[backend], name, kind, (2, 2, some_length(backend, name, kind), 16), torch.float32)


@kinds
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_width_and_dtype_is_the_reference(backend, width, dtype, kind) -> None:
    name = "log bias" if backend == "sdpa" else "scale-invariant"
    check(BACKENDS[backend], name, kind, (1, 2, some_length(backend, str(width), kind), width), dtype)
