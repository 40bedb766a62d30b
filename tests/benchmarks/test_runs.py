"""Steps of finished runs in turns: what is built, what is written, what the comparison makes of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit import GPT
from anlit.benchmarks import harness, runs
from anlit.cli import main
from anlit.compare.comparison import STEPS, read_step_times, seconds_per_token
from anlit.errors import UserError
from anlit.io.provenance import machine
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import write_run

SHAPE = {"vocab_size": 64, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 16}
LOSSES = {"GPT": (5.0, 4.0, 3.0), "NGPT": (4.5, 3.0, 2.5), "AnGPT": (4.0, 2.8, 2.4)}


def make(folder: Path, model: str, **record: object) -> Path:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    config = {
        "seed_everything": 1, "trainer": {"precision": None},
        "model": {"class_path": f"anlit.{model}", "init_args": {**SHAPE, "optimizer": optimizer}},
        "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "x", "batch_size": 4}},
    }  # fmt: skip
    write_run(
        folder,
        config,
        record,
        [(100.0 * n, loss) for n, loss in enumerate(LOSSES[model], 1)],
        lambda n: n,
    )
    return folder


def time_steps(output: Path, *folders: Path) -> None:
    runs.time_steps(group_runs([load_run(folder) for folder in folders]), output)


def test_the_comparison_has_wall_clock_from_steps_in_turns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "MOST", 3)
    hardware = {"hardware": {**machine(), "threads": 1, "devices": ["cpu"]}}
    gpt, _, angpt = (make(tmp_path / "runs" / model, model, **hardware) for model in LOSSES)
    compare = ["compare", str(tmp_path / "runs"), "--output", str(out := tmp_path / "out")]
    out.mkdir()
    time_steps(out, gpt, angpt)
    assert main(compare) == 0
    raw = json.loads((out / "convergence.json").read_text())
    timed = {result["label"]: result["time_per_token"] for result in raw["groups"]}
    assert timed["anGPT, plain"]["median"] > 0
    assert timed["nGPT, plain"] is None
    assert any(note.startswith("nGPT, plain: no steps were timed for it") for note in raw["notes"])
    assert main([*compare, "--measure_steps"]) == 0
    seconds = seconds_per_token(read_step_times(out)).values()
    assert [len(values) for values in seconds] == [3, 3, 3]
    assert min(map(min, seconds)) > 0


def test_steps_are_in_the_runs_precision_clipped_and_accumulated_as_in_it(
    tmp_path: Path, monkeypatch
) -> None:
    counted: list[Any] = []
    step = GPT.training_step
    monkeypatch.setattr(
        GPT,
        "training_step",
        lambda self, *given: counted.append(self.trainer) or step(self, *given),
    )
    folder = make(tmp_path / "run", "GPT")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"] = {
        "precision": "64-true",
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.5,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    time_steps(tmp_path, folder)
    assert (counted[0].precision, counted[0].gradient_clip_val) == ("64-true", 0.5)
    assert len(counted) == 3 * counted[0].global_step
    assert read_step_times(tmp_path)["arms"][0]["tokens"] == 3 * 4 * counted[0].model.context_length


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, runs.FEWEST), (0.1, 40)])
def test_rounds_go_on_until_the_ratios_are_precise(
    tmp_path: Path, monkeypatch, noise: float, rounds: int
) -> None:
    turns: list[object] = []

    def pretended(step: object, device: object, repeats: int = 1) -> float:
        """The second configuration's time changes from round to round."""
        turns.append(step)
        return 1.0 + (noise * ((turns.count(step) - 1) % 3) if step != turns[0] else 0.0)

    monkeypatch.setattr(harness, "seconds_of_calls", pretended)
    monkeypatch.setattr(runs, "MOST", 40)
    time_steps(tmp_path, make(tmp_path / "a", "GPT"), make(tmp_path / "b", "AnGPT"))
    arms = json.loads((tmp_path / STEPS).read_text())["arms"]
    assert [len(arm["seconds_per_token"]) for arm in arms] == [rounds, rounds]


@pytest.mark.parametrize(("place", "named"), [
    ("model", "os.system"), ("optimizer", "subprocess.Popen"), ("lr", "os.system"), ("attention", "stranger.Layer"),
])  # fmt: skip
def test_only_models_and_optimizers_are_built(
    tmp_path: Path, place: str, named: str, monkeypatch
) -> None:
    """Neither is a module imported: one could lie in the folder that somebody else's runs came in."""
    (tmp_path / "stranger.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Layer: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = {"class_path": named, "init_args": {"args": ["mkdir", str(tmp_path / "ran")]}}
    folder = make(tmp_path / "run", "GPT")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    settings = config["model"]["init_args"]
    (settings["optimizer"]["init_args"] if place == "lr" else settings)[place] = foreign
    config["model"] |= {"class_path": named} if place == "model" else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    said = r"config.yaml: model.* (names|has settings that are no numbers|cannot be built)"
    with pytest.raises(UserError, match=said) as error:
        time_steps(tmp_path, folder)
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "stranger" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_steps_that_fail_are_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "take_step", lambda *given: {}["no memory"])
    with pytest.raises(
        UserError, match=r"could not be timed \('no memory'\): leave out --measure_steps"
    ):
        time_steps(tmp_path, make(tmp_path / "run", "GPT"))
