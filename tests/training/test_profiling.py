"""The profiler of trainer/profile.yaml, which is Lightning's."""

import json
from pathlib import Path

import yaml
from lightning.pytorch.profilers import PyTorchProfiler

from anlit import GPT
from anlit.shipped import FOLDER
from anlit.training.loggers import CSVLogger
from tests.models.tiny import fit, tiny


def test_a_trace_of_three_steps_and_a_table(tmp_path: Path) -> None:
    settings = yaml.safe_load((FOLDER / "trainer" / "profile.yaml").read_text())["trainer"]
    profiler = PyTorchProfiler(**settings["profiler"]["init_args"])
    fit(tiny(GPT), max_steps=settings["max_steps"], logger=CSVLogger(str(tmp_path)), profiler=profiler)
    (trace,) = tmp_path.glob("*.pt.trace.json")
    names = [str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{n}" for n in (2, 3, 4)]
    assert "Optimizer.step#AdamW.step" in (tmp_path / "fit-profile.txt").read_text()
