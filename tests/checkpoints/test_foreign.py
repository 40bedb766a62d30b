"""Checkpoints of every form are read without running code: what a stranger's file names is not called."""

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
from anlit.data.storage import remote
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


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A folder that is there when foreign code has run."""
    return tmp_path / "marker"


def payloads(marker: Path) -> dict[str, dict[str, Any]]:
    """Settings that make the folder `marker` where something calls what they name."""
    call = {"class_path": "os.mkdir", "init_args": {"path": str(marker)}}
    shell = {"class_path": "os.system", "init_args": {"command": f"mkdir {marker}"}}
    process = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", str(marker)]}}
    layers = [{"class_path": "anlit.SlidingWindow", "init_args": {"width": 4, "mechanism": shell}}]
    return {
        "attention": {"attention": shell}, "a class of another type": {"attention": process},
        "positions": {"positions": call},
        "deep inside": {"attention": {"class_path": "anlit.AttentionPattern", "init_args": {"layers": layers}}},
        "dict_kwargs": {"attention": {"class_path": "anlit.Plain", "dict_kwargs": shell}},
        "a bare name": {"attention": "os.getcwd"}, "a group of settings": {"schedule": shell},
        "a number": {"d_model": shell}, "a key that is none": {"callback": shell}, "optimizer": {"optimizer": shell},
        "_instantiator": {"_instantiator": "os.mkdir", "_class_path": "os.mkdir"},
    }  # fmt: skip


UNUSED = ("optimizer", "_instantiator")  # no model needs these: they are not looked at


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", payloads(Path()))
@pytest.mark.covering(1)
def test_what_a_checkpoint_names_is_not_called(
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
"""Commands on the model `path`; `run` is in order and tells data and configuration."""
READS_THE_MODEL = tuple(COMMANDS)[:6]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_makes_what_a_checkpoint_names_or_unpickles_an_object(
    name: str, trained_run: Path, tmp_path: Path, marker: Path, capsys
) -> None:
    reads_model = name in READS_THE_MODEL
    path = as_file(
        trained_run, tmp_path, payloads(marker)["deep inside" if reads_model else "optimizer"]
    )
    main(COMMANDS[name].format(path=path, run=trained_run, out=tmp_path / "out").split())
    assert (
        "names 'os.system', which is no Mechanism of anlit" in capsys.readouterr().err
    ) == reads_model
    torch.save({**content_of(trained_run), "extra": RunsCode(marker)}, path)
    assert (
        main(COMMANDS[name].format(path=path, run=trained_run, out=tmp_path / "out2").split()) == 2
    )
    assert not marker.exists()


HERE = "tests.checkpoints.test_foreign"
MAKER = {"class_path": f"{HERE}.make", "init_args": {"path": "MARKER"}}
SHELL = {"class_path": "os.system", "init_args": {"command": "mkdir MARKER"}}
PROCESS = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "MARKER"]}}
INSIDE = {"class_path": "LambdaCallback", "init_args": {"setup": f"{HERE}.make"}}
CONFIGURED: list[tuple[str, str, Any]] = [
    *(
        ("fit", "model.init_args.optimizer", value)
        for value in (SHELL, MAKER, PROCESS, f"{HERE}.make")
    ),
    ("fit", "model.init_args.attention", MAKER),
    *(
        ("fit", key, MAKER)
        for key in ("model", "data", "trainer.logger", "trainer.strategy", "trainer.profiler")
    ),
    *(("fit", "trainer.callbacks", [value]) for value in (MAKER, PROCESS, INSIDE)),
    ("fit", "trainer.plugins", [MAKER]),
    *((name, "model.init_args.optimizer", MAKER) for name in ("validate", "test", "size")),
    *(
        (name, "data", value)
        for name in ("lengths", "diagnose", "needle")
        for value in (SHELL, PROCESS)
    ),
]


def make(path: str) -> torch.optim.Optimizer:
    """Says that it returns an optimizer, and makes a folder."""
    os.mkdir(path)
    raise AssertionError


@pytest.mark.parametrize(("name", "key", "value"), CONFIGURED)
def test_a_configuration_names_classes_of_the_right_type_alone(
    name: str, key: str, value: Any, trained_run: Path, tmp_path: Path, marker: Path, refusal
) -> None:
    """Whether it is one's own or lies in a run folder."""
    copy = as_run(trained_run, tmp_path, {})
    *sections, last = key.split(".")

    def change(config: Any) -> None:
        for section in sections:
            config = config[section]
        config[last] = yaml.safe_load(yaml.safe_dump(value).replace("MARKER", str(marker)))

    change_config(copy, change)
    folder = [str(copy), f"--output={tmp_path / 'out'}", "--device=cpu"]
    new = [
        f"--config={copy}/config.yaml",
        *([f"--run_dir={tmp_path / 'new'}"] if name == "fit" else []),
    ]
    sentence = refusal(name, *(folder if name in READS_THE_MODEL else new))
    assert not marker.exists()
    assert last.removesuffix("s") in sentence
    assert "which is no" in sentence


def test_a_tag_for_python_in_a_config_makes_nothing(
    trained_run: Path, tmp_path: Path, marker: Path, refusal
) -> None:
    config = as_run(trained_run, tmp_path, {}) / "config.yaml"
    config.write_text(
        f"x: !!python/object/apply:os.system ['mkdir {marker}']\n{config.read_text()}"
    )
    said = refusal("validate", f"--config={config}")
    assert "config.yaml cannot be read (could not determine a constructor" in said
    assert not marker.exists()


UNPICKLES = re.compile(r"pickle\.load|Unpickler|FileSystemReader")
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


def test_nothing_unpickles_and_torch_load_takes_tensors_and_plain_values_alone() -> None:
    for file in Path(anlit.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not UNPICKLES.search(text), file
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file


OWN_CLASS = """
from anlit.nn.mechanisms.mechanism import Mechanism
class Steep(Mechanism):
    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.slope = slope
    def distance_bias(self, t):
        return -self.slope * t
"""


def test_a_class_of_one_s_own_is_made_where_its_module_is_imported(
    trained_run: Path, tmp_path: Path, monkeypatch, refusal
) -> None:
    (tmp_path / "labmade.py").write_text(OWN_CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = as_file(
        trained_run,
        tmp_path,
        {"attention": {"class_path": "labmade.Steep", "init_args": {"slope": 3}}},
    )
    asked = ["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"]
    sentence = refusal(*asked)
    assert "labmade" not in sys.modules
    assert "names 'labmade.Steep', which is no Mechanism" in sentence
    assert "add --import" in sentence
    assert main([*asked, "--import", "labmade"]) == 0
    assert load_checkpoint(str(path), "cpu").model.model.blocks[0].attention.mechanism.slope == 3.0


def test_lightning_s_own_loading_is_refused(trained_run: Path) -> None:
    model = load_checkpoint(str(trained_run), "cpu").model
    with pytest.raises(UserError, match=r"use anlit\.load_checkpoint\(path\)\.model"):
        type(model).load_from_checkpoint(trained_run / "checkpoints" / "best.ckpt")


def test_the_address_of_a_checkpoint_s_data_is_not_asked(
    trained_run: Path, tmp_path: Path, monkeypatch, refusal
):
    fetch = Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr(remote, "fetch", fetch)
    content = content_of(trained_run)
    content["anlit"]["data"]["path"] = "s3://somebody/data"
    torch.save(content, tmp_path / "a.ckpt")
    generate = ["generate", str(tmp_path / "a.ckpt"), "the cat", "--device", "cpu"]
    assert "has no tokenizer" in refusal(*generate)
    assert not fetch.called
    refusal(*generate, "--tokenizer", "s3://my/data")
    assert [call.args[0] for call in fetch.call_args_list] == ["s3://my/data/tokenizer.json"]
