"""Checkpoints of every form are read without running the code that they name."""

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

import anlit
from anlit.cli import main
from anlit.data.storage import manifest
from anlit.errors import UserError
from anlit.training.load_model import load_checkpoint
from tests.checkpoints.foreign import (
    FORMS,
    RunsCode,
    as_file,
    as_run,
    change_config,
    content_of,
    refused,
)

slow = pytest.mark.slow


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A folder that exists if foreign code has run."""
    return tmp_path / "marker"


def payloads(marker: Path) -> dict[str, dict[str, Any]]:
    """Settings that make the folder `marker` if something calls the functions that they name."""
    call = {"class_path": "os.mkdir", "init_args": {"path": str(marker)}}
    shell = {"class_path": "os.system", "init_args": {"command": f"mkdir {marker}"}}
    process = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", str(marker)]}}
    layers = [{"class_path": "anlit.SlidingWindow", "init_args": {"width": 4, "mechanism": shell}}]
    pattern = {"class_path": "anlit.AttentionPattern", "init_args": {"layers": layers}}
    return {
        "attention": {"attention": shell},
        "a class of another type": {"attention": process},
        "positions": {"positions": call},
        "deep inside": {"attention": pattern},
        "dict_kwargs": {"attention": {"class_path": "anlit.Plain", "dict_kwargs": shell}},
        "a bare name": {"attention": "os.getcwd"},
        "a group of settings": {"schedule": shell},
        "a number": {"d_model": shell},
        "an unknown key": {"callback": shell},
        "optimizer": {"optimizer": shell},
        "_instantiator": {"_instantiator": "os.mkdir", "_class_path": "os.mkdir"},
    }


UNUSED = ("optimizer", "_instantiator")
"""Payloads in settings that no model needs, so that a reader ignores them."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", payloads(Path()))
@pytest.mark.covering(1)
def test_a_function_that_a_checkpoint_names_is_not_called(
    form: str, payload: str, trained_run: Path, tmp_path: Path, marker: Path
) -> None:
    path = FORMS[form](trained_run, tmp_path, payloads(marker)[payload])

    if payload in UNUSED:
        assert load_checkpoint(str(path), "cpu").training_length == 16
    else:
        assert str(tmp_path) in refused(path, device="cpu")
    assert not marker.exists()


DATA = "--data {run}/../data --output {out} --device cpu"
NEW_RUN = "--config={run}/config.yaml --run_dir={out}"
COMMANDS = {
    "generate": "generate {path} the --max_tokens 2 --device cpu",
    "export": "export {path} --output {out}",
    "score": "score {path} {run}/hparams.yaml --output {out}/scores.parquet",
    "lengths": f"lengths {{path}} {DATA} --lengths 16 --tokens 64",
    "diagnose": f"diagnose {{path}} {DATA} --lengths 16 --tokens 64",
    "needle": f"needle {{path}} {DATA} --lengths 64 --samples 1",
    "validate": f"validate {NEW_RUN} --ckpt_path={{path}}",
    "fit --initial_weights": f"fit {NEW_RUN} --trainer.max_steps=3 --initial_weights={{path}}",
    "fit --ckpt_path": f"fit {NEW_RUN} --trainer.max_steps=3 --ckpt_path={{path}}",
}
"""Commands on the model `path`; the intact `run` tells data and configuration."""
SHARED_READER = ("export", "score", "lengths", "diagnose", "needle")
"""Commands that load the model as `generate` does."""
REBUILD_MODEL = ("generate", "export", "score", "lengths", "diagnose", "needle")
"""Commands that build the model from the settings in the checkpoint."""


def marked(command: str) -> Any:
    """A parameter, slow if `generate` shows the same."""
    marks = [slow] if command in SHARED_READER else []
    return pytest.param(command, marks=marks)


commands = pytest.mark.parametrize("name", list(map(marked, COMMANDS)))


@commands
def test_no_command_calls_a_function_that_a_checkpoint_names(
    name: str, trained_run: Path, tmp_path: Path, marker: Path, capsys
) -> None:
    payload = "deep inside" if name in REBUILD_MODEL else "optimizer"
    path = as_file(trained_run, tmp_path, payloads(marker)[payload])

    command = COMMANDS[name].format(path=path, run=trained_run, out=tmp_path / "out")
    main(command.split())

    is_refused = "names 'os.system', which is no Mechanism of anlit" in capsys.readouterr().err
    assert is_refused == (name in REBUILD_MODEL)
    assert not marker.exists()


@commands
def test_no_command_unpickles_an_object(
    name: str, trained_run: Path, tmp_path: Path, marker: Path
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({**content_of(trained_run), "extra": RunsCode(marker)}, path)

    command = COMMANDS[name].format(path=path, run=trained_run, out=tmp_path / "out")

    assert main(command.split()) == 2
    assert not marker.exists()


def make_marker(path: str) -> torch.optim.Optimizer:
    """Claims to return an optimizer, and makes a folder."""
    os.mkdir(path)
    raise AssertionError


MAKER_PATH = f"tests.checkpoints.test_foreign.{make_marker.__name__}"
MAKER = {"class_path": MAKER_PATH, "init_args": {"path": "MARKER"}}
SHELL = {"class_path": "os.system", "init_args": {"command": "mkdir MARKER"}}
PROCESS = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "MARKER"]}}
INSIDE = {"class_path": "LambdaCallback", "init_args": {"setup": MAKER_PATH}}
OPTIMIZER = "model.init_args.optimizer"
CONFIGURED: list[Any] = [
    ("fit", OPTIMIZER, SHELL),
    ("fit", OPTIMIZER, MAKER),
    ("fit", OPTIMIZER, PROCESS),
    ("fit", OPTIMIZER, MAKER_PATH),
    ("fit", "model.init_args.attention", MAKER),
    ("fit", "model", MAKER),
    ("fit", "data", MAKER),
    ("fit", "trainer.logger", MAKER),
    ("fit", "trainer.strategy", MAKER),
    ("fit", "trainer.profiler", MAKER),
    ("fit", "trainer.callbacks", [MAKER]),
    ("fit", "trainer.callbacks", [PROCESS]),
    ("fit", "trainer.callbacks", [INSIDE]),
    ("fit", "trainer.plugins", [MAKER]),
    ("validate", OPTIMIZER, MAKER),
    ("test", OPTIMIZER, MAKER),
    ("size", OPTIMIZER, MAKER),
    ("lengths", "data", SHELL),
    pytest.param("lengths", "data", PROCESS, marks=slow),
    pytest.param("diagnose", "data", SHELL, marks=slow),
    ("diagnose", "data", PROCESS),
    ("needle", "data", SHELL),
    pytest.param("needle", "data", PROCESS, marks=slow),
]
"""Command, key of config.yaml, and a value that makes the folder MARKER if something calls it."""


@pytest.mark.parametrize(("command", "key", "value"), CONFIGURED)
def test_a_configuration_may_name_only_classes_of_the_right_type(
    command: str, key: str, value: Any, trained_run: Path, tmp_path: Path, marker: Path, refusal
) -> None:
    """Commands on a run read config.yaml from its folder; all others get the file."""
    run = as_run(trained_run, tmp_path, {})
    *sections, name = key.split(".")

    with_marker = yaml.safe_dump(value).replace("MARKER", str(marker))

    def change(config: Any) -> None:
        for section in sections:
            config = config[section]
        config[name] = yaml.safe_load(with_marker)

    change_config(run, change)
    if command in REBUILD_MODEL:
        options = [str(run), f"--output={tmp_path / 'out'}", "--device=cpu"]
    else:
        options = [f"--config={run}/config.yaml"]
    if command == "fit":
        options.append(f"--run_dir={tmp_path / 'new'}")

    message = refusal(command, *options)

    assert not marker.exists()
    assert name.removesuffix("s") in message
    assert "which is no" in message


def test_a_tag_for_python_in_a_config_makes_nothing(
    trained_run: Path, tmp_path: Path, marker: Path, refusal
) -> None:
    config = as_run(trained_run, tmp_path, {}) / "config.yaml"
    config.write_text(
        f"x: !!python/object/apply:os.system ['mkdir {marker}']\n{config.read_text()}"
    )

    message = refusal("validate", f"--config={config}")

    assert "config.yaml cannot be read (could not determine a constructor" in message
    assert not marker.exists()


UNPICKLES = re.compile(r"pickle\.load|Unpickler|FileSystemReader")
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


def test_nothing_unpickles_and_torch_load_takes_only_tensors_and_plain_values() -> None:
    for file in Path(anlit.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not UNPICKLES.search(text), file
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file


USER_MODULE = """
from anlit.nn.mechanisms.mechanism import Mechanism
class Steep(Mechanism):
    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.slope = slope
    def distance_bias(self, t):
        return -self.slope * t
"""


def test_a_user_s_class_is_made_only_if_its_module_is_imported(
    trained_run: Path, tmp_path: Path, monkeypatch, refusal
) -> None:
    (tmp_path / "labmade.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    steep = {"class_path": "labmade.Steep", "init_args": {"slope": 3}}
    path = as_file(trained_run, tmp_path, {"attention": steep})
    command = ["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"]

    message = refusal(*command)

    assert "labmade" not in sys.modules
    assert "names 'labmade.Steep', which is no Mechanism" in message
    assert "add --import" in message

    assert main([*command, "--import", "labmade"]) == 0
    decoder = load_checkpoint(str(path), "cpu").model.model
    assert decoder.blocks[0].attention.mechanism.slope == 3.0


def test_lightning_s_load_from_checkpoint_is_refused(trained_run: Path) -> None:
    model = load_checkpoint(str(trained_run), "cpu").model

    with pytest.raises(UserError, match=r"use anlit\.load_checkpoint\(path\)\.model"):
        type(model).load_from_checkpoint(trained_run / "checkpoints" / "best.ckpt")


def test_no_request_goes_to_the_address_of_a_checkpoint_s_data(
    trained_run: Path, tmp_path: Path, monkeypatch, refusal
) -> None:
    fetch = Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr(manifest, "download_bytes", fetch)
    content = content_of(trained_run)
    content["anlit"]["data"]["path"] = "s3://somebody/data"
    torch.save(content, tmp_path / "a.ckpt")
    command = ["generate", str(tmp_path / "a.ckpt"), "the cat", "--device", "cpu"]

    assert "has no tokenizer" in refusal(*command)
    assert not fetch.called

    refusal(*command, "--tokenizer", "s3://my/data")
    assert [call.args[0] for call in fetch.call_args_list] == ["s3://my/data/tokenizer.json"]
