"""A run made by the command line, and the prepared folder of the evaluation tests."""

from pathlib import Path

import pytest

from tests.checkpoints.foreign import trained
from tests.evaluation.conftest import data  # noqa: F401  a fixture


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """A run of anGPT with a tokenizer, made by `anlit fit`; tests do not change it."""
    return trained(tmp_path_factory.mktemp("trained"), "AnGPT")
