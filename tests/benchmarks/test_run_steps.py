"""Steps of finished runs in turns: the model, the record, and the comparison made of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from anlit import GPT
from anlit.benchmarks import harness, run_steps
from anlit.benchmarks.training_step import random_batches, take_step
from anlit.cli import main
from anlit.compare.comparison import read_step_times, seconds_per_token
from anlit.errors import UserError
from anlit.io.provenance import machine
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import write_run

SHAPE = {
    "vocab_size": 64,
    "context_length": 32,
    "n_layers": 1,
    "n_heads": 2,
    "d_model": 16,
}
LOSSES = {
    "GPT": {100: 5.0, 200: 4.0, 300: 3.0},
    "NGPT": {100: 4.5, 200: 3.0, 300: 2.5},
    "AnGPT": {100: 4.0, 200: 2.8, 300: 2.4},
}
"""By tokens."""


def make_run(folder: Path, model: str, **record: object) -> Path:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    settings = {**SHAPE, "optimizer": optimizer}
    data_settings = {"path": "x", "batch_size": 4}
    config = {
        "seed_everything": 1,
        "trainer": {"precision": None},
        "model": {"class_path": f"anlit.{model}", "init_args": settings},
        "data": {"class_path": "anlit.TokenShards", "init_args": data_settings},
    }
    write_run(folder, config, record, LOSSES[model])
    return folder


def read_config(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


def write_config(run: Path, config: Any) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def time_steps(output: Path, *folders: Path) -> None:
    runs = list(map(load_run, folders))
    run_steps.time_steps(group_runs(runs), output)


def test_timed_steps_do_not_learn(tmp_path: Path) -> None:
    """A model that learned its only batch by heart, or diverged, would be timed on a GPU's highest
    clock."""
    run = load_run(make_run(tmp_path / "run", "AnGPT"))
    trainer, _ = run_steps.prepare_run(run, torch.device("cpu"))
    weight = trainer.lightning_module.model.head.weight
    shape = (4, SHAPE["context_length"])
    (batch,) = random_batches(SHAPE["vocab_size"], shape, False, torch.device("cpu"), n_batches=1)
    start = weight.detach().clone()

    for _ in range(3):
        take_step(trainer, batch)

    assert trainer.optimizers[0].state[weight]["exp_avg"].any()
    torch.testing.assert_close(weight.detach(), start, rtol=0, atol=1e-6)  # rows are bounded again


def test_the_comparison_has_wall_clock_from_steps_in_turns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_steps, "MAX_ROUNDS", 3)
    hardware = {**machine(), "threads": 1, "devices": ["cpu"]}
    runs = tmp_path / "runs"
    for model in LOSSES:
        make_run(runs / model, model, hardware=hardware)
    output = tmp_path / "out"
    output.mkdir()

    time_steps(output, runs / "GPT", runs / "AnGPT")
    assert main(["compare", str(runs), f"--output={output}"]) == 0

    record = json.loads((output / "convergence.json").read_text())
    times = {}
    for group in record["groups"]:
        times[group["label"]] = group["time_per_token"]
    assert times["anGPT, plain"]["median"] > 0
    assert times["nGPT, plain"] is None
    notes = "\n".join(record["notes"])
    assert "nGPT, plain: no steps were timed for it" in notes


def test_compare_measures_steps_of_every_configuration(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_steps, "MAX_ROUNDS", 3)
    runs = tmp_path / "runs"
    for model in LOSSES:
        make_run(runs / model, model)
    output = tmp_path / "out"

    assert main(["compare", str(runs), f"--output={output}", "--measure_steps"]) == 0

    seconds = seconds_per_token(read_step_times(output))
    assert len(seconds) == 3
    for seconds_by_round in seconds.values():
        assert len(seconds_by_round) == 3
        assert min(seconds_by_round) > 0


def test_steps_have_the_runs_precision_clipping_and_accumulation(
    tmp_path: Path, monkeypatch
) -> None:
    trainers: list[Any] = []
    training_step = GPT.training_step

    def recorded_step(model: GPT, *arguments: Any) -> Any:
        trainers.append(model.trainer)
        return training_step(model, *arguments)

    monkeypatch.setattr(GPT, "training_step", recorded_step)
    run = make_run(tmp_path / "run", "GPT")
    config = read_config(run)
    config["trainer"] = {
        "precision": "64-true",
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.5,
    }
    write_config(run, config)

    time_steps(tmp_path, run)

    trainer, *_ = trainers
    assert trainer.precision == "64-true"
    assert trainer.gradient_clip_val == 0.5
    assert len(trainers) == 3 * trainer.global_step
    (arm,) = read_step_times(tmp_path)["arms"]
    assert arm["tokens"] == 3 * 4 * trainer.model.context_length


@pytest.mark.parametrize(
    ("noise", "n_rounds"),
    [
        pytest.param(0.0, run_steps.MIN_ROUNDS, id="precise"),
        pytest.param(0.1, 40, id="noisy"),
    ],
)
def test_rounds_go_on_until_the_ratios_are_precise(
    tmp_path: Path, monkeypatch, noise: float, n_rounds: int
) -> None:
    steps: list[object] = []

    def pretended_seconds(step: object, device: object, repeats: int = 1) -> float:
        """The second configuration's time changes from round to round."""
        steps.append(step)
        if step == steps[0]:
            return 1.0
        n_rounds = steps.count(step) - 1
        return 1.0 + noise * (n_rounds % 3)

    monkeypatch.setattr(harness, "seconds_of_calls", pretended_seconds)
    monkeypatch.setattr(run_steps, "MAX_ROUNDS", 40)
    first = make_run(tmp_path / "a", "GPT")
    second = make_run(tmp_path / "b", "AnGPT")

    time_steps(tmp_path, first, second)

    arms = read_step_times(tmp_path)["arms"]
    assert len(arms) == 2
    for arm in arms:
        assert len(arm["seconds_per_token"]) == n_rounds


@pytest.mark.parametrize(
    ("key", "class_path"),
    [
        ("model", "os.system"),
        ("optimizer", "subprocess.Popen"),
        ("lr", "os.system"),
        ("attention", "stranger.Layer"),
    ],
)
def test_only_models_and_optimizers_are_built(
    tmp_path: Path, key: str, class_path: str, monkeypatch
) -> None:
    """No module is imported either: a stranger's run folder could contain it."""
    evidence = tmp_path / "ran"
    module = f"import os\nos.mkdir({str(evidence)!r})\nclass Layer: ...\n"
    (tmp_path / "stranger.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = {"class_path": class_path, "init_args": {"args": ["mkdir", str(evidence)]}}
    run = make_run(tmp_path / "run", "GPT")
    config = read_config(run)
    settings = config["model"]["init_args"]
    if key == "model":
        config["model"]["class_path"] = class_path
    elif key == "lr":
        settings["optimizer"]["init_args"]["lr"] = foreign
    else:
        settings[key] = foreign
    write_config(run, config)

    messages = r"config.yaml: model.* (names|has settings that are neither numbers|cannot be built)"
    with pytest.raises(UserError, match=messages) as error:
        time_steps(tmp_path, run)

    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "stranger" not in sys.modules
    assert not evidence.exists()


def test_a_failing_step_is_reported_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("no memory")

    monkeypatch.setattr(run_steps, "take_step", fail)
    run = make_run(tmp_path / "run", "GPT")
    message = r"could not be timed \('no memory'\): leave out --measure_steps"

    with pytest.raises(UserError, match=message):
        time_steps(tmp_path, run)
