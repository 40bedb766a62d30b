"""A profiler that leaves a trace in the run folder."""

import json
from pathlib import Path

import pytest

from anlit import GPT
from anlit.errors import UserError
from anlit.training.loggers import CSVLogger
from anlit.training.profiling import TraceProfiler
from tests.models.tiny import fit, tiny


def test_a_trace_of_the_active_steps_and_a_table(tmp_path: Path) -> None:
    profiler = TraceProfiler(wait=2, warmup=1, active=2)
    fit(tiny(GPT), max_steps=7, logger=CSVLogger(str(tmp_path)), profiler=profiler)
    events = json.loads((tmp_path / "profile" / "training-rank0.pt.trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert [name for name in names if str(name).startswith("ProfilerStep#")] == ["ProfilerStep#3", "ProfilerStep#4"]
    assert sum(str(name).startswith("Optimizer.step") for name in names) == 2
    assert "aten::addmm" in names or "aten::mm" in names
    table = (tmp_path / "profile" / "fit-profile.txt").read_text()
    assert "Optimizer.step#AdamW.step" in table


def test_a_schedule_without_steps_is_refused() -> None:
    with pytest.raises(UserError, match="active=0"):
        TraceProfiler(active=0)
