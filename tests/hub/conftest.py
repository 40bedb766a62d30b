"""A small run folder with a tokenizer, and a place for the code that transformers copies."""

from pathlib import Path
from typing import Any

import pytest

from anlit import GPT
from tests.evaluation.saved import make_run_with_text


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tokenizer."""
    return make_run_with_text(tmp_path_factory.mktemp("text"), GPT)


@pytest.fixture(scope="session")
def own_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where transformers copies a folder's code to, for this session alone."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules"))
        )
        yield
