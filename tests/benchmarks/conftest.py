from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """What would be compiled runs as it is: compiling takes longer than all else here, and has tests of its own."""
    with torch.compiler.set_stance("force_eager"):
        yield
