"""The runs of every shipped study keep the hashes in their folders' names, so that `--reuse` finds recorded ones.

A hash is of all settings and of the content of all configuration files. Only where runs are meant to be other ones may
the record be written anew:

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


def hashes_of(path: str, budget: str | None) -> dict[str, str]:
    """Arm → a hash over those of its runs, each point of its grids on each seed."""
    study = read_study(path, budget)
    runs: dict[str, list[str]] = {}
    for arm in study.arms:
        seeds = [*study.seeds, *(study.tuning_seeds if arm.is_tuned else ())]
        names = [PlannedRun(arm, point, seed).name for point in arm.points for seed in seeds]
        runs.setdefault(arm.base, []).extend(name.rpartition("-")[2] for name in names)
    return {
        arm: hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:8]
        for arm, names in runs.items()
    }


@pytest.mark.parametrize("study", json.loads(RECORD.read_text()) if RECORD.is_file() else {})
def test_the_runs_of_a_shipped_study_keep_their_hashes(study: str) -> None:
    name, _, budget = study.partition(" ")
    known = json.loads(RECORD.read_text())[study]
    actual = hashes_of(str(STUDIES / f"{name}.yaml"), budget or None)
    assert {arm: actual.get(arm) for arm in known} == known


if __name__ == "__main__":
    shipped = {" ".join(filter(None, [file.stem, budget])): hashes_of(str(file), budget)
               for file in sorted(STUDIES.glob("*.yaml"))
               for budget in yaml.safe_load(file.read_text()).get("budgets") or [None]}  # fmt: skip
    RECORD.write_text(json.dumps(shipped, indent=1) + "\n")
