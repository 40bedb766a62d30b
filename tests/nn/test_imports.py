"""The networks are plain torch: a notebook imports them without the Trainer."""

import subprocess
import sys

MODULES = (
    "anlit.nn.models.gpt",
    "anlit.nn.models.ngpt",
    "anlit.nn.models.angpt",
    "anlit.nn.models.fold",
)


def test_networks_are_imported_without_lightning() -> None:
    code = f"import sys, {', '.join(MODULES)}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    imported = set(result.stdout.split())

    assert imported >= set(MODULES)
    assert {"lightning", "anlit.io", "anlit.checkpoints", "anlit.training"}.isdisjoint(imported)
