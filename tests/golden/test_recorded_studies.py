"""Recorded comparisons have the recorded numbers when they are computed again from their curves.

`tests/golden/test_recorded_pages.py` compares the other numbers of a record.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anlit.commands.study import main
from anlit.study.sections import annealed, convergence

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def recorded_studies() -> list[Path]:
    studies = []
    for path in sorted(RESULTS.rglob("report.json")):
        if "measured" in json.loads(path.read_text()):
            studies.append(path)
    return studies


def studies_with_comparisons() -> list[Path]:
    return [path for path in recorded_studies() if json.loads(path.read_text())["comparisons"]]


def groups(report: dict[str, Any]) -> list[dict[str, Any]]:
    groups = []
    for comparison in report["comparisons"]:
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


def assert_same(actual: Any, recorded: Any, label: str) -> None:
    """Compare the leaves of parts of two reports."""
    expected = [approximately(leaf) for leaf in leaves(recorded)]
    assert leaves(actual) == expected, label


@pytest.mark.parametrize(
    "path", studies_with_comparisons(), ids=lambda path: str(path.parent.relative_to(RESULTS))
)
def test_a_recorded_study_is_computed_again(path: Path, tmp_path: Path) -> None:
    recorded = json.loads(path.read_text())
    shutil.copy(path, tmp_path)

    assert main(["--recompute", str(tmp_path)]) == 0

    recomputed = json.loads((tmp_path / "report.json").read_text())
    for old, new in zip(groups(recorded), groups(recomputed), strict=True):
        assert old.keys() == new.keys()
        assert_same(new, old, old["label"])


def test_a_recorded_study_is_drawn_again_with_its_times_of_steps(tmp_path: Path) -> None:
    folder = RESULTS / "defaults" / "1.3m"
    source = ["--config=study/defaults.yaml", "--budget=cpu-1.3m", "--reuse", str(folder)]

    assert main([*source, f"--output={tmp_path / 'out'}", "--report_only"]) == 0

    recorded = groups(json.loads((folder / "report.json").read_text()))
    drawn = groups(json.loads((tmp_path / "out" / "report.json").read_text()))
    assert any(group["speedup_wall_clock"] for group in recorded)
    for old, new in zip(recorded, drawn, strict=True):
        for key in ("final_loss", "speedup_tokens", "time_per_token", "speedup_wall_clock"):
            assert_same(new[key], old[key], f"{old['label']}, {key}")


def test_recorded_speed_ups_of_annealed_runs_follow_from_their_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, differences, both speed-ups and their trends, for each comparison and length."""
    for module, function in ((annealed, "draw"), (convergence, "plot_convergence")):
        monkeypatch.setattr(module, function, lambda *_: None)  # pictures take seconds
    folder = RESULTS / "annealed"
    source = ["--config=study/annealed.yaml", "--budget=cpu", "--reuse", str(folder)]

    assert main([*source, f"--output={tmp_path / 'out'}", "--report_only"]) == 0

    recorded = json.loads((folder / "report.json").read_text())["annealed"]
    drawn = json.loads((tmp_path / "out" / "report.json").read_text())["annealed"]
    assert len(recorded) == 7, "arms in two comparisons"
    for old, new in zip(recorded, drawn, strict=True):
        assert new.keys() == old.keys()
        assert_same(new, old, f"{old['arm']} against {old['baseline']}")
