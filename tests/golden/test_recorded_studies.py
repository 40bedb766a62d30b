"""Recorded studies have the recorded numbers when they are computed again from their curves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anlit.commands.study import main

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def recorded_studies() -> list[Path]:
    studies = []
    for path in sorted(RESULTS.rglob("report.json")):
        if "measured" in json.loads(path.read_text()):
            studies.append(path)
    return studies


def groups(path: Path) -> list[dict[str, Any]]:
    groups = []
    for comparison in json.loads(path.read_text())["comparisons"]:
        groups += comparison["groups"]
    return groups


def leaves(value: Any) -> list[Any]:
    """The numbers and texts in nested lists and mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return [value]
    numbers_and_texts = []
    for entry in value:
        numbers_and_texts += leaves(entry)
    return numbers_and_texts


def approximately(leaf: Any) -> Any:
    return pytest.approx(leaf, rel=1e-3, abs=1e-5) if isinstance(leaf, float) else leaf


@pytest.mark.parametrize(
    "recorded", recorded_studies(), ids=lambda path: str(path.parent.relative_to(RESULTS))
)
def test_a_recorded_study_is_computed_again(recorded: Path, tmp_path: Path) -> None:
    shutil.copy(recorded, tmp_path)

    assert main(["--recompute", str(tmp_path)]) == 0

    recorded_groups = groups(recorded)
    recomputed_groups = groups(tmp_path / "report.json")
    for old, new in zip(recorded_groups, recomputed_groups, strict=True):
        expected = [approximately(leaf) for leaf in leaves(old)]
        assert old.keys() == new.keys()
        assert leaves(new) == expected, old["label"]
