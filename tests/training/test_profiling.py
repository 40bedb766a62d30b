"""The profiler of trainer/profile.yaml, which is Lightning's."""

import json
from pathlib import Path

from tests.integration.conftest import fit_arguments, run, shards

__all__ = ["shards"]


def test_a_trace_of_three_steps_and_a_table(shards: Path, tmp_path: Path) -> None:
    own = ("--config=trainer/profile.yaml", "--trainer.max_steps=6", "--trainer.limit_val_batches=0")
    assert run(fit_arguments(shards, tmp_path, *own)) == 0
    (trace,) = tmp_path.glob("*.pt.trace.json")
    names = [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{n}" for n in (2, 3, 4)]
    assert "Optimizer.step#AdamW.step" in (tmp_path / "fit-profile.txt").read_text()
