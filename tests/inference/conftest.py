"""Fixtures of the tests of inference."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def own_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where transformers copies a folder's code to, for this session alone."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
