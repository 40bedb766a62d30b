"""`anlit study` over real trainings: killed while it trains, started again, and its report the same as undisturbed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from anlit.analysis.study.launch import LOCK

from .conftest import VOCABULARY

pytestmark = pytest.mark.slow
MODEL = {"vocab_size": VOCABULARY, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 32}
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 5}


@pytest.fixture
def study(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of two arms, two rates each, two seeds, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("GPT", "AnGPT"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"model": {"class_path": f"anlit.{name}"}}))
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": str(shards), "batch_size": 4}}
    trainer = QUIET | {"accelerator": "cpu", "max_steps": 40, "val_check_interval": 10, "limit_val_batches": 2}
    common = {"model": {"init_args": MODEL}, "data": data, "trainer": trainer, "checkpoint_every_n_steps": 5}
    (tmp_path / "common.yaml").write_text(yaml.safe_dump(common))
    tune = {"model.init_args.schedule.warmup": [0.0, 0.2]}
    arms = {name: {"configs": [f"{name}.yaml"], "tune": tune} for name in ("GPT", "AnGPT")}
    content = {"baseline": "GPT", "arms": arms, "shared": {"configs": ["common.yaml"]}, "seeds": [1, 2]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "anlit", "study", "--config", "study.yaml", "--output", "out", "--jobs", "2"]
    return subprocess.Popen([*command, "--threads", "1"], cwd=folder, start_new_session=True)


def findings(folder: Path) -> list:
    """What the report says that the clock does not decide."""
    found = json.loads((folder / "report.json").read_text())
    return [found["selected"], found["tuning"], found["points"]]


def test_a_killed_study_goes_on_where_it_was_and_reports_the_same(study: Path) -> None:
    assert start(study).wait(900) == 0
    undisturbed = (study / "out").rename(study / "before")
    process = start(study)
    deadline = time.monotonic() + 300
    while not list((study / "out").glob("*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for lock in (study / "out").glob(f"*/{LOCK}"):  # a killed run may still end what it had asked of the disk
        with lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    cut = {path.parents[1].name for path in (study / "out").glob("*/checkpoints/last.ckpt")}
    assert cut
    assert start(study).wait(900) == 0
    records = (study / "out").glob("*/run.json")
    told = {record.parent.name: len(json.loads(record.read_text())["launches"]) - 1 for record in records}
    assert {name for name, times in told.items() if times} <= cut
    assert findings(study / "out") == findings(undisturbed)
    assert len(findings(undisturbed)[2][0]["losses"]) == 2
