"""The comparisons of every recorded study have the recorded numbers when they are computed again from their curves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anlit.commands.study import main

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDIES = [
    path
    for path in sorted(RESULTS.rglob("report.json"))
    if "measured" in json.loads(path.read_text())
]


def groups(path: Path) -> list[dict[str, Any]]:
    return [
        group
        for comparison in json.loads(path.read_text())["comparisons"]
        for group in comparison["groups"]
    ]


def flat(value: Any) -> list[Any]:
    """The numbers and texts in nested lists and mappings."""
    parts = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return [value] if parts is None else [leaf for part in parts for leaf in flat(part)]


@pytest.mark.parametrize(
    "recorded", STUDIES, ids=lambda path: str(path.parent.relative_to(RESULTS))
)
def test_a_recorded_study_is_computed_again(recorded: Path, tmp_path: Path) -> None:
    shutil.copy(recorded, tmp_path)
    assert main(["--recompute", str(tmp_path)]) == 0
    for old, new in zip(groups(recorded), groups(tmp_path / "report.json"), strict=True):
        assert old.keys() == new.keys()
        known = [
            pytest.approx(leaf, rel=1e-3, abs=1e-5) if isinstance(leaf, float) else leaf
            for leaf in flat(old)
        ]
        assert flat(new) == known, old["label"]
