"""The runs of shipped studies keep the hashes in their names, by which `--reuse` finds them.

A hash covers all settings and the content of all configuration files. Only if runs are meant to
change may the record be written anew:

    python -m tests.golden.test_run_hashes
"""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from anlit.study.plan import PlannedRun
from anlit.study.read_study import read_study

STUDIES = Path(__file__).parents[2] / "configs" / "study"
RECORD = Path(__file__).with_name("run_hashes.json")


def hashes_of_arms(path: Path, budget: str | None) -> dict[str, str]:
    """Arm → a hash over its runs' hashes. A run has a point of the grids and a seed."""
    study = read_study(str(path), budget)
    run_hashes: dict[str, list[str]] = {}
    for arm in study.arms:
        seeds = [*study.seeds]
        if arm.is_tuned:
            seeds += study.tuning_seeds
        for point in arm.points:
            for seed in seeds:
                run = PlannedRun(arm, point, seed)
                _, _, run_hash = run.name.rpartition("-")
                run_hashes.setdefault(arm.base, []).append(run_hash)
    hashes = {}
    for arm_name, of_runs in run_hashes.items():
        text = " ".join(sorted(of_runs))
        hashes[arm_name] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return hashes


@pytest.mark.parametrize("study", json.loads(RECORD.read_text()) if RECORD.is_file() else {})
def test_the_runs_of_a_shipped_study_keep_their_hashes(study: str) -> None:
    name, _, budget = study.partition(" ")
    recorded = json.loads(RECORD.read_text())[study]

    actual = hashes_of_arms(STUDIES / f"{name}.yaml", budget or None)

    for arm, recorded_hash in recorded.items():
        assert actual.get(arm) == recorded_hash, arm


def write() -> None:
    """Store the hashes of all shipped studies, with each of their budgets."""
    record = {}
    for path in sorted(STUDIES.glob("*.yaml")):
        budgets = yaml.safe_load(path.read_text()).get("budgets") or [None]
        for budget in budgets:
            name = path.stem if budget is None else f"{path.stem} {budget}"
            record[name] = hashes_of_arms(path, budget)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write()
