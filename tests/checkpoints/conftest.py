"""A run of the command line, and the prepared folder that the tests of evaluations have."""

from pathlib import Path

import pytest

from tests.checkpoints.foreign import trained
from tests.evaluation.conftest import data  # noqa: F401  a fixture


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """An anGPT with a tokenizer, made by `anlit fit`; tests leave it as it is."""
    return trained(tmp_path_factory.mktemp("trained"), "AnGPT")
