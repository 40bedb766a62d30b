"""The networks are plain torch: a notebook imports them without the Trainer."""

import subprocess
import sys

import pytest

MODULES = (
    "anlit.nn.models.gpt",
    "anlit.nn.models.ngpt",
    "anlit.nn.models.angpt",
    "anlit.nn.models.fold",
)


@pytest.mark.parametrize("module", MODULES)
def test_a_network_is_imported_without_lightning(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    imported = set(result.stdout.split())

    assert {"lightning", "anlit.io", "anlit.checkpoints", "anlit.training"}.isdisjoint(imported)
