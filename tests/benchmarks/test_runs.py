"""Steps of finished runs in turns: what is built, what is written, what the comparison makes of it."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from anlit.analysis.compare import compare
from anlit.analysis.wall_clock import BUSY, FILE, read_step_times
from anlit.benchmarks import runs
from anlit.benchmarks.time_runs import WAITING, time_steps
from anlit.cli import main
from anlit.configuration import IMPORTED
from anlit.errors import UserError
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs

SHAPE = {"vocab_size": 64, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 16}
LOSSES = {"GPT": (5.0, 4.0, 3.0), "NGPT": (4.5, 3.0, 2.5), "AnGPT": (4.0, 2.8, 2.4)}


def make(folder: Path, model: str, lr: float = 0.01, **record: object) -> str:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr}}
    config = {
        "seed_everything": 1,
        "model": {"class_path": f"anlit.{model}", "init_args": {**SHAPE, "optimizer": optimizer}},
        "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "x", "batch_size": 4}},
        "trainer": {"precision": None},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"status": "finished", **record}))
    rows = [f"{loss},{100 * n},{n}" for n, loss in enumerate(LOSSES[model], 1)]
    (folder / "metrics.csv").write_text("\n".join(["val/loss,val/tokens,val/seconds", *rows]))
    return str(folder)


def test_the_comparison_has_wall_clock_from_steps_in_turns(tmp_path: Path) -> None:
    from anlit.reporting.provenance import machine

    hardware = {"hardware": {**machine(), "threads": 1, "devices": ["cpu"]}}
    folders = [make(tmp_path / "runs" / model, model, **hardware) for model in ("GPT", "AnGPT", "NGPT")]
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / FILE
    assert runs.main([*folders[:2], "--output", str(output), "--rounds", "3", "--device", "cpu"]) == 0
    paired = read_step_times(output.parent)
    groups = group_runs([load_run(Path(folder)) for folder in folders])
    assert set(paired.seconds) == {group.key for group in groups[:2]}
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in paired.seconds.values())

    report = compare([str(tmp_path / "runs")], str(output.parent))
    raw = json.loads(report.json.read_text())
    found = {claim["label"]: claim for claim in raw["groups"][1:]}
    time, speed = found["anGPT, plain"]["time_per_token"], found["anGPT, plain"]["speedup_wall_clock"]
    in_tokens = next(group for group in raw["groups"] if group["label"] == "anGPT, plain")["speedup_tokens"]["mean"]
    assert speed["median"] == pytest.approx(in_tokens / time["median"])
    assert (speed["low"], speed["high"]) == pytest.approx((in_tokens / time["high"], in_tokens / time["low"]))
    assert found["nGPT, plain"]["time_per_token"] is None
    assert any(note.startswith("nGPT, plain: no steps were timed for it") for note in raw["notes"])
    assert raw["paired_steps"]["arms"][0]["run"] == folders[0]


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, runs.FEWEST), (0.1, 40)])
def test_rounds_go_on_until_the_ratios_are_precise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, rounds: int
) -> None:
    folders = [Path(make(tmp_path / model, model)) for model in ("GPT", "AnGPT")]
    made: list[int] = []

    def pretended(step: object, device: object, repeats: int = 1) -> Callable[[], float]:
        made.append(1)
        number, turns = len(made), itertools.count()
        return lambda: 1.0 + (noise * (next(turns) % 3) if number == 4 else 0.0)

    monkeypatch.setattr(runs, "timed", pretended)
    monkeypatch.setattr(runs, "MOST", 40)
    found = runs.measure([load_run(folder) for folder in folders], None, torch.device("cpu"))
    assert [len(arm["seconds_per_token"]) for arm in found["arms"]] == [rounds, rounds]


@pytest.mark.parametrize(("running", "status"), [(0.39, BUSY), (0.98, 0)])
def test_a_busy_machine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: float, status: int) -> None:
    """Threads of a busy machine are running for a part of the time only."""
    clock = time.perf_counter
    monkeypatch.setattr(time, "process_time", lambda: 2 * running * clock())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    output = tmp_path / "steps.json"
    command = [make(tmp_path / "run", "GPT"), "--output", str(output), "--rounds", "2", "--device", "cpu"]
    assert runs.main([*command, "--unless_busy"]) == status
    assert output.exists() == (status == 0)
    assert runs.main(command) == 0
    assert json.loads(output.read_text())["working"] == pytest.approx(running, rel=0.01)


@pytest.mark.parametrize("said", [None, "active"])
@pytest.mark.parametrize("busy", [True, False])
def test_threads_sleep_on_a_busy_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, said: str | None
) -> None:
    started: list[tuple[bool, str | None]] = []

    def start(words: list[str], *, check: bool, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        asks = words[-1] == "--unless_busy"
        started.append((asks, {**os.environ, **(env or {})}.get(WAITING)))
        return subprocess.CompletedProcess(words, BUSY if asks and busy else 0)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.delenv(WAITING, raising=False)
    if said:
        monkeypatch.setenv(WAITING, said)
    time_steps(group_runs([load_run(Path(make(tmp_path / "run", "GPT")))]), tmp_path)
    asleep = [(False, "passive")] if busy else []
    assert started == ([(False, said)] if said else [(True, None), *asleep])


@pytest.mark.parametrize("named", ["os.system", "subprocess.Popen", "stranger.Layer", "anlit.cli.main"])
@pytest.mark.parametrize("place", ["model", "optimizer", "lr", "attention", "layers"])
@pytest.mark.covering(1)
def test_only_models_and_optimizers_are_built(
    tmp_path: Path, place: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a module imported: one could lie in the folder that somebody else's runs came in."""
    (tmp_path / "stranger.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Layer: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = {"class_path": named, "init_args": {"args": ["mkdir", str(tmp_path / "ran")]}}
    folder = Path(make(tmp_path / "run", "GPT"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    model = config["model"]["init_args"]
    model |= {
        "model": {},
        "optimizer": {"optimizer": foreign},
        "lr": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": foreign}}},
        "attention": {"attention": foreign},
        "layers": {"attention": {"class_path": "anlit.AttentionPattern", "init_args": {"layers": [foreign]}}},
    }[place]
    config["model"]["class_path"] = named if place == "model" else "anlit.GPT"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"config.yaml: model.* (names|has settings that are no numbers)") as error:
        runs.main([str(folder), "--output", str(tmp_path / "x.json"), "--device", "cpu"])
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "stranger" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_model_of_one_s_own_is_imported_by_the_process_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "ownmodel.py").write_text("import anlit\nclass Mine(anlit.GPT): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = Path(make(tmp_path / "run", "GPT"))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("anlit.GPT", "ownmodel.Mine"))
    own = ["--output", str(tmp_path / "x.json"), "--rounds", "1", "--device", "cpu"]
    with pytest.raises(UserError, match="is no LanguageModel of anlit or of an imported module"):
        runs.main([str(folder), *own])

    started: list[str] = []

    def start(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        started.extend(words)
        return subprocess.CompletedProcess(words, 0)

    request.addfinalizer(IMPORTED.clear)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", start)
        out = ["--baseline", str(folder), "--output", str(tmp_path / "out")]
        main(["compare", str(folder), *out, "--measure_steps", "--import", "ownmodel"])
    assert started[1:3] == ["-m", "anlit.benchmarks.runs"]
    assert runs.main([*started[3:], *own]) == 0
