"""Steps of finished runs in turns: what is built, what is written, what the comparison makes of it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml

from anlit.analysis.compare import compare
from anlit.analysis.wall_clock import FILE, read_step_times
from anlit.benchmarks import harness, runs
from anlit.cli import main
from anlit.configuration import IMPORTED
from anlit.errors import UserError
from anlit.reporting.provenance import machine
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.analysis.conftest import write_run

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
    write_run(folder, config, record, [(100.0 * n, loss) for n, loss in enumerate(LOSSES[model], 1)], lambda n: n)
    return str(folder)


def test_the_comparison_has_wall_clock_from_steps_in_turns(tmp_path: Path) -> None:
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
    raw = json.loads((report.output / "convergence.json").read_text())
    timed = {result["label"]: result["time_per_token"] for result in raw["groups"]}
    assert timed["anGPT, plain"]["median"] > 0
    assert timed["nGPT, plain"] is None
    assert any(note.startswith("nGPT, plain: no steps were timed for it") for note in raw["notes"])
    assert raw["paired_steps"]["arms"][0]["run"] == folders[0]


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, runs.FEWEST), (0.1, 40)])
def test_rounds_go_on_until_the_ratios_are_precise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, rounds: int
) -> None:
    folders = [Path(make(tmp_path / model, model)) for model in ("GPT", "AnGPT")]
    turns: list[object] = []

    def pretended(step: object, device: object, repeats: int = 1) -> float:
        """The second configuration's time changes from round to round."""
        turns.append(step)
        return 1.0 + (noise * ((turns.count(step) - 1) % 3) if step != turns[0] else 0.0)

    monkeypatch.setattr(harness, "seconds_of_calls", pretended)
    monkeypatch.setattr(runs, "MOST", 40)
    record = runs.measure([load_run(folder) for folder in folders], None, torch.device("cpu"))
    assert [len(arm["seconds_per_token"]) for arm in record["arms"]] == [rounds, rounds]


@pytest.mark.parametrize(
    ("place", "named"),
    [("model", "os.system"), ("optimizer", "subprocess.Popen"), ("lr", "os.system"), ("unknown", ""),
     ("attention", "stranger.Layer"), ("layers", "anlit.cli.main")],
)  # fmt: skip
def test_only_models_and_optimizers_are_built(
    tmp_path: Path, place: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a module imported: one could lie in the folder that somebody else's runs came in."""
    (tmp_path / "stranger.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Layer: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = {"class_path": named, "init_args": {"args": ["mkdir", str(tmp_path / "ran")]}}
    folder = Path(make(tmp_path / "run", "GPT"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["init_args"] |= {
        "model": {},
        "optimizer": {"optimizer": foreign},
        "unknown": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"speed": 1.0}}},
        "lr": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": foreign}}},
        "attention": {"attention": foreign},
        "layers": {"attention": {"class_path": "anlit.AttentionPattern", "init_args": {"layers": [foreign]}}},
    }[place]
    config["model"]["class_path"] = named if place == "model" else "anlit.GPT"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    said = r"config.yaml: model.* (names|has settings that are no numbers|cannot be built)"
    with pytest.raises(UserError, match=said) as error:
        runs.main([str(folder), "--output", str(tmp_path / "x.json"), "--device", "cpu"])
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "stranger" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_model_of_one_s_own_is_imported_by_the_process_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "ownmodel.py").write_text("import anlit\nclass Mine(anlit.GPT): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Path(make(tmp_path / "run", "GPT")) / "config.yaml"
    config.write_text(config.read_text().replace("anlit.GPT", "ownmodel.Mine"))
    own = ["--output", str(tmp_path / "x.json"), "--rounds", "1", "--device", "cpu"]
    with pytest.raises(UserError, match="is no LanguageModel of anlit or of an imported module"):
        runs.main([str(config.parent), *own])

    started: list[str] = []
    request.addfinalizer(IMPORTED.clear)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda words, **_: started.extend(words) or Namespace(returncode=0))
        out = ["--baseline", str(config.parent), "--output", str(tmp_path / "out")]
        main(["compare", str(config.parent), *out, "--measure_steps", "--import", "ownmodel"])
    assert started[1:3] == ["-m", "anlit.benchmarks.runs"]
    assert runs.main([*started[3:], *own]) == 0
