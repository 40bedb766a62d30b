"""Checkpoints of every form are read without running code: what a stranger's file names is not called."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.configuration import IMPORTED
from anlit.errors import UserError
from tests.checkpoints.foreign import FORMS, RunsCode, as_file, as_run, trained

NESTED = {"class_path": "anlit.SlidingWindow", "init_args": {"width": 4}}
IN_LAYERS = "anlit.AttentionPattern"


def payloads(marker: Path) -> dict[str, dict[str, Any]]:
    """Settings that make the folder `marker` where something calls what they name."""
    call = {"class_path": "os.mkdir", "init_args": {"path": str(marker)}}
    shell = {"class_path": "os.system", "init_args": {"command": f"mkdir {marker}"}}
    process = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", str(marker)]}}
    layers = [{**NESTED, "init_args": {"mechanism": shell}}]
    return {
        "attention": {"attention": shell},
        "a class of another type": {"attention": process},
        "positions": {"positions": call},
        "deep inside": {"attention": {"class_path": IN_LAYERS, "init_args": {"layers": layers}}},
        "dict_kwargs": {"attention": {"class_path": "anlit.Plain", "dict_kwargs": shell}},
        "a function of anlit": {"attention": {"class_path": "anlit.cli.main", "init_args": {"argv": ["--help"]}}},
        "a bare name": {"attention": "os.getcwd"},
        "a group of settings": {"schedule": shell},
        "a number": {"d_model": shell},
        "a key that is none": {"callback": shell},
    }


def silent(marker: Path) -> dict[str, dict[str, Any]]:
    """Such settings that no model needs: they are not looked at."""
    shell = {"class_path": "os.system", "init_args": {"command": f"mkdir {marker}"}}
    return {
        "optimizer": {"optimizer": shell},
        "a named optimizer": {"optimizer": "os.getcwd"},
        "_instantiator": {"_instantiator": "os.mkdir", "_class_path": "os.mkdir"},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("foreign"), "AnGPT")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", payloads(Path()))
@pytest.mark.covering(1)
def test_what_a_checkpoint_names_is_not_called(form: str, payload: str, run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = FORMS[form](run, tmp_path, payloads(marker)[payload])
    with pytest.raises(UserError) as error:
        load_checkpoint(str(path), "cpu")
    assert not marker.exists()
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", silent(Path()))
@pytest.mark.covering(1)
def test_what_evaluation_does_not_need_is_left_alone(form: str, payload: str, run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = FORMS[form](run, tmp_path, silent(marker)[payload])
    assert load_checkpoint(str(path), "cpu").training_length == 16
    assert not marker.exists()


def commands(path: Path, run: Path, out: Path) -> dict[str, Callable[[], int]]:
    """Every command that reads a model, on `path`; `run` is in order and tells data and configuration."""
    text = out.parent / "text.txt"
    text.write_text("the cat sat\n")
    config = run / "config.yaml"
    data = ["--data", str(run.parent / "data"), "--output", str(out), "--device", "cpu"]
    fit = ["fit", f"--config={config}", f"--run_dir={out}", "--trainer.max_steps=3", "--trainer.limit_val_batches=1"]
    return {
        "generate": lambda: main(["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"]),
        "export": lambda: main(["export", str(path), "--output", str(out)]),
        "score": lambda: main(["score", str(path), str(text), "--output", str(out / "scores.parquet")]),
        "lengths": lambda: main(["lengths", str(path), *data, "--lengths", "16", "--tokens", "64"]),
        "diagnose": lambda: main(["diagnose", str(path), *data, "--lengths", "16", "--tokens", "64"]),
        "needle": lambda: main(["needle", str(path), *data, "--lengths", "64", "--samples", "1"]),
        "validate": lambda: main(["validate", f"--config={config}", f"--ckpt_path={path}"]),
        "fit --initial_weights": lambda: main([*fit, f"--initial_weights={path}"]),
        "fit --ckpt_path": lambda: main([*fit, f"--ckpt_path={path}"]),
    }


READS_THE_MODEL = ("generate", "export", "score", "lengths", "diagnose", "needle")
READS_WEIGHTS = ("validate", "fit --initial_weights", "fit --ckpt_path")


@pytest.mark.parametrize("form", FORMS)
def test_no_command_calls_what_a_checkpoint_names(form: str, run: Path, tmp_path: Path, capsys) -> None:
    marker = tmp_path / "marker"
    path = FORMS[form](run, tmp_path, payloads(marker)["deep inside"])
    for name in READS_THE_MODEL:
        capsys.readouterr()
        assert commands(path, run, tmp_path / name)[name]() == 2, name
        assert not marker.exists(), name
        shown = capsys.readouterr().err
        assert "names 'os.system', which is no Mechanism of anlit" in shown, shown


@pytest.mark.parametrize("name", [*READS_THE_MODEL, *READS_WEIGHTS])
def test_no_command_makes_the_optimizer_that_a_checkpoint_names(name: str, run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = as_file(run, tmp_path, silent(marker)["optimizer"])
    commands(path, run, tmp_path / "out")[name]()
    assert not marker.exists()


@pytest.mark.parametrize("name", [*READS_THE_MODEL, *READS_WEIGHTS])
def test_no_command_unpickles_objects(name: str, run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    path = tmp_path / "a.ckpt"
    torch.save({**content, "extra": RunsCode(marker)}, path)
    assert commands(path, run, tmp_path / "out")[name]() == 2
    assert not marker.exists()


DATA = {
    "a function": {"class_path": "os.mkdir", "init_args": {"path": "MARKER"}},
    "another class": {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "MARKER"]}},
    "a bare name": {"class_path": "mkdir", "init_args": {"path": "MARKER"}},
    "inside": {"class_path": "anlit.TokenShards", "init_args": {"path": {"class_path": "os.getcwd"}}},
}


@pytest.mark.parametrize("case", DATA)
def test_a_run_s_config_does_not_choose_its_data_s_class(case: str, run: Path, tmp_path: Path, capsys) -> None:
    copy, marker = as_run(run, tmp_path, {}), tmp_path / "marker"
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["data"] = yaml.safe_load(yaml.safe_dump(DATA[case]).replace("MARKER", str(marker)))
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    output = ["--output", str(tmp_path / "out"), "--device", "cpu"]
    for command in ("lengths", "diagnose", "needle"):
        capsys.readouterr()
        assert main([command, str(copy), *output]) == 2
        assert "config.yaml: data" in capsys.readouterr().err
        assert not marker.exists()
    for command in (["validate"], ["size"], ["fit", f"--run_dir={tmp_path / 'new'}"]):
        assert main([*command, f"--config={copy}/config.yaml"]) == 2
        assert not marker.exists()


MAKER = {"class_path": "tests.checkpoints.test_foreign.make", "init_args": {"path": "MARKER"}}
SHELL = {"class_path": "os.system", "init_args": {"command": "mkdir MARKER"}}
PROCESS = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "MARKER"]}}
INSIDE = {"class_path": "LambdaCallback", "init_args": {"setup": "tests.checkpoints.test_foreign.announce"}}
CONFIGURED: list[tuple[str, Any]] = [
    ("model.init_args.optimizer", SHELL),
    ("model.init_args.optimizer", MAKER),
    ("model.init_args.optimizer", PROCESS),
    ("model.init_args.optimizer", "tests.checkpoints.test_foreign.make"),
    ("model.init_args.attention", MAKER),
    ("model", MAKER),
    ("data", MAKER),
    ("trainer.callbacks", [MAKER]),
    ("trainer.callbacks", [PROCESS]),
    ("trainer.callbacks", [INSIDE]),
    ("trainer.logger", MAKER),
    ("trainer.plugins", [MAKER]),
    ("trainer.strategy", MAKER),
    ("trainer.profiler", MAKER),
]


def make(path: str) -> torch.optim.Optimizer:
    """Says that it returns an optimizer, and makes a folder."""
    os.mkdir(path)
    raise AssertionError


def announce(*arguments: Any, **more: Any) -> None:
    raise AssertionError("it was called")


CASES = [("fit", *case) for case in CONFIGURED] + [(name, *CONFIGURED[1]) for name in ("validate", "test", "size")]


@pytest.mark.parametrize(("command", "key", "value"), CASES)
def test_a_configuration_names_classes_of_the_right_type_alone(
    command: str, key: str, value: Any, run: Path, tmp_path: Path, capsys
) -> None:
    marker, file = tmp_path / "marker", tmp_path / "hostile.yaml"
    hostile: Any = value
    for name in reversed(key.split(".")):
        hostile = {name: hostile}
    config = yaml.safe_load((run / "config.yaml").read_text())
    if key.startswith("model."):
        hostile["model"]["class_path"] = config["model"]["class_path"]
    file.write_text(yaml.safe_dump(hostile).replace("MARKER", str(marker)))
    own = [f"--run_dir={tmp_path / 'new'}"] if command == "fit" else []
    assert main([command, f"--config={run}/config.yaml", f"--config={file}", *own]) == 2
    assert not marker.exists()
    assert f"{key.removeprefix('model.init_args.').removesuffix('s')}" in (sentence := capsys.readouterr().err)
    assert "which is no" in sentence


def test_a_class_of_one_s_own_is_made_where_its_module_is_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "labmade.py").write_text(
        "from anlit.attention.mechanism import Mechanism\n"
        "class Steep(Mechanism):\n"
        "    def __init__(self, slope: float = 1.0) -> None:\n"
        "        super().__init__()\n"
        "        self.slope = slope\n"
        "    def distance_bias(self, t):\n"
        "        return -self.slope * t\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = as_file(run, tmp_path, {"attention": {"class_path": "labmade.Steep", "init_args": {"slope": 3}}})
    asked = ["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"]
    assert main(asked) == 2
    assert "labmade" not in sys.modules
    assert "names 'labmade.Steep', which is no Mechanism" in (sentence := capsys.readouterr().err)
    assert "add --import" in sentence
    assert main([*asked, "--import", "labmade"]) == 0
    assert load_checkpoint(str(path), "cpu").model.model.blocks[0].attention.mechanism.slope == 3.0
    capsys.readouterr()
    assert main([*asked, "--import", "nosuchlab"]) == 2
    assert "--import nosuchlab fails" in capsys.readouterr().err
    assert main(["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"]) == 0
    assert IMPORTED == []  # the next command starts no process with a module that only this one named


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a.ckpt", "s3://bucket/a.ckpt", "registry:someone/model"])
@pytest.mark.parametrize("command", ["fit", "validate", "test"])
@pytest.mark.covering(1)
def test_a_checkpoint_at_an_address_is_refused(command: str, address: str, run: Path, tmp_path: Path, capsys) -> None:
    own = [f"--run_dir={tmp_path / 'new'}"]
    assert main([command, f"--config={run}/config.yaml", f"--ckpt_path={address}", *own]) == 2
    assert f"the checkpoint {address} is not on this machine: download it" in capsys.readouterr().err


def test_lightning_s_own_loading_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"use anlit\.load_checkpoint\(path\)\.model"):
        type(load_checkpoint(str(run), "cpu").model).load_from_checkpoint(run / "checkpoints" / "best.ckpt")
