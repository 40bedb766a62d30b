"""Checkpoints of every form are read without running code: what a stranger's file names is not called."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.storage import remote
from anlit.errors import UserError
from tests.checkpoints.foreign import FORMS, RunsCode, as_file, as_run, change_config, content_of


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
        "attention": {"attention": shell},
        "a class of another type": {"attention": process},
        "positions": {"positions": call},
        "deep inside": {"attention": {"class_path": "anlit.AttentionPattern", "init_args": {"layers": layers}}},
        "dict_kwargs": {"attention": {"class_path": "anlit.Plain", "dict_kwargs": shell}},
        "a function of anlit": {"attention": {"class_path": "anlit.cli.main", "init_args": {"argv": ["--help"]}}},
        "a bare name": {"attention": "os.getcwd"},
        "a group of settings": {"schedule": shell},
        "a number": {"d_model": shell},
        "a key that is none": {"callback": shell},
    }


def silent(marker: Path) -> dict[str, dict[str, Any]]:
    """Such settings that no model needs: they are not looked at."""
    return {
        "optimizer": {"optimizer": {"class_path": "os.system", "init_args": {"command": f"mkdir {marker}"}}},
        "a named optimizer": {"optimizer": "os.getcwd"},
        "_instantiator": {"_instantiator": "os.mkdir", "_class_path": "os.mkdir"},
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", payloads(Path()))
@pytest.mark.covering(1)
def test_what_a_checkpoint_names_is_not_called(
    form: str, payload: str, trained_run: Path, tmp_path: Path, marker: Path
) -> None:
    path = FORMS[form](trained_run, tmp_path, payloads(marker)[payload])
    with pytest.raises(UserError) as error:
        load_checkpoint(str(path), "cpu")
    assert not marker.exists()
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", silent(Path()))
@pytest.mark.covering(1)
def test_what_evaluation_does_not_need_is_left_alone(
    form: str, payload: str, trained_run: Path, tmp_path: Path, marker: Path
) -> None:
    path = FORMS[form](trained_run, tmp_path, silent(marker)[payload])
    assert load_checkpoint(str(path), "cpu").training_length == 16
    assert not marker.exists()


READS_THE_MODEL = ("generate", "export", "score", "lengths", "diagnose", "needle")
READS_WEIGHTS = ("validate", "fit --initial_weights", "fit --ckpt_path")


def command(name: str, path: Path, run: Path, out: Path) -> list[str]:
    """A command on the model `path`; `run` is in order and tells data and configuration."""
    text = out.parent / "text.txt"
    text.write_text("the cat sat\n")
    data = ["--data", str(run.parent / "data"), "--output", str(out), "--device", "cpu"]
    config = [f"--config={run}/config.yaml", f"--run_dir={out}"]
    fit = ["fit", *config, "--trainer.max_steps=3", "--trainer.limit_val_batches=1"]
    return {
        "generate": ["generate", str(path), "the cat", "--max_tokens", "2", "--device", "cpu"],
        "export": ["export", str(path), "--output", str(out)],
        "score": ["score", str(path), str(text), "--output", str(out / "scores.parquet")],
        "lengths": ["lengths", str(path), *data, "--lengths", "16", "--tokens", "64"],
        "diagnose": ["diagnose", str(path), *data, "--lengths", "16", "--tokens", "64"],
        "needle": ["needle", str(path), *data, "--lengths", "64", "--samples", "1"],
        "validate": ["validate", *config, f"--ckpt_path={path}"],
        "fit --initial_weights": [*fit, f"--initial_weights={path}"],
        "fit --ckpt_path": [*fit, f"--ckpt_path={path}"],
    }[name]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READS_THE_MODEL)
@pytest.mark.covering(1)
def test_no_command_makes_the_attention_that_a_checkpoint_names(
    name: str, form: str, trained_run: Path, tmp_path: Path, marker: Path, capsys
) -> None:
    path = FORMS[form](trained_run, tmp_path, payloads(marker)["deep inside"])
    assert main(command(name, path, trained_run, tmp_path / "out")) == 2
    assert "names 'os.system', which is no Mechanism of anlit" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("name", [*READS_THE_MODEL, *READS_WEIGHTS])
def test_no_command_makes_its_optimizer_or_unpickles_an_object(
    name: str, trained_run: Path, tmp_path: Path, marker: Path
) -> None:
    path = as_file(trained_run, tmp_path, silent(marker)["optimizer"])
    if name in READS_WEIGHTS:  # the others load the model as above
        main(command(name, path, trained_run, tmp_path / "out"))
    torch.save({**content_of(trained_run), "extra": RunsCode(marker)}, path)
    assert main(command(name, path, trained_run, tmp_path / "out 2")) == 2
    assert not marker.exists()


HERE = "tests.checkpoints.test_foreign"
MAKER = {"class_path": f"{HERE}.make", "init_args": {"path": "MARKER"}}
SHELL = {"class_path": "os.system", "init_args": {"command": "mkdir MARKER"}}
PROCESS = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "MARKER"]}}
INSIDE = {"class_path": "LambdaCallback", "init_args": {"setup": f"{HERE}.make"}}
CONFIGURED: list[tuple[str, Any]] = [
    ("model.init_args.optimizer", SHELL),
    ("model.init_args.optimizer", MAKER),
    ("model.init_args.optimizer", PROCESS),
    ("model.init_args.optimizer", f"{HERE}.make"),
    ("model.init_args.attention", MAKER),
    *((key, MAKER) for key in ("model", "data", "trainer.logger", "trainer.strategy", "trainer.profiler")),
    *(("trainer.callbacks", [value]) for value in (MAKER, PROCESS, INSIDE)),
    ("trainer.plugins", [MAKER]),
]


def make(path: str) -> torch.optim.Optimizer:
    """Says that it returns an optimizer, and makes a folder."""
    os.mkdir(path)
    raise AssertionError


CASES = [("fit", *case) for case in CONFIGURED]
CASES += [(name, *CONFIGURED[1]) for name in ("validate", "test", "size")]
CASES += [(name, "data", value) for name in ("lengths", "diagnose", "needle") for value in (SHELL, PROCESS)]


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_a_configuration_names_classes_of_the_right_type_alone(
    name: str, key: str, value: Any, trained_run: Path, tmp_path: Path, marker: Path, capsys
) -> None:
    """Whether it is one's own or lies in a run folder."""
    copy = as_run(trained_run, tmp_path, {})
    hostile = yaml.safe_load(yaml.safe_dump(value).replace("MARKER", str(marker)))

    def change(config: Any) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        config[last] = hostile

    change_config(copy, change)
    folder = [str(copy), f"--output={tmp_path / 'out'}", "--device=cpu"]
    new = [f"--config={copy}/config.yaml", *([f"--run_dir={tmp_path / 'new'}"] if name == "fit" else [])]
    assert main([name, *(folder if name in READS_THE_MODEL else new)]) == 2
    assert not marker.exists()
    assert f"{key.removeprefix('model.init_args.').removesuffix('s')}" in (sentence := capsys.readouterr().err)
    assert "which is no" in sentence


def test_a_class_of_one_s_own_is_made_where_its_module_is_imported(
    trained_run: Path, tmp_path: Path, monkeypatch, capsys
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
    path = as_file(trained_run, tmp_path, {"attention": {"class_path": "labmade.Steep", "init_args": {"slope": 3}}})
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


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a.ckpt", "s3://bucket/a.ckpt", "registry:someone/model"])
@pytest.mark.parametrize("name", ["fit", "validate", "test"])
@pytest.mark.covering(1)
def test_a_checkpoint_at_an_address_is_refused(
    name: str, address: str, trained_run: Path, tmp_path: Path, capsys
) -> None:
    own = [f"--run_dir={tmp_path / 'new'}"]
    assert main([name, f"--config={trained_run}/config.yaml", f"--ckpt_path={address}", *own]) == 2
    assert f"the checkpoint {address} is not on this machine: download it" in capsys.readouterr().err


def test_lightning_s_own_loading_is_refused(trained_run: Path) -> None:
    with pytest.raises(UserError, match=r"use anlit\.load_checkpoint\(path\)\.model"):
        type(load_checkpoint(str(trained_run), "cpu").model).load_from_checkpoint(
            trained_run / "checkpoints" / "best.ckpt"
        )


def test_the_address_of_a_checkpoint_s_data_is_not_asked(
    trained_run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    asked = []

    def fetch(address: str, *arguments: Any) -> None:
        asked.append(address)
        raise FileNotFoundError(address)

    monkeypatch.setattr(remote, "fetch", fetch)
    content = content_of(trained_run)
    content["anlit"]["data"]["path"] = "s3://somebody/data"
    torch.save(content, tmp_path / "a.ckpt")
    generate = ["generate", str(tmp_path / "a.ckpt"), "the cat", "--device", "cpu"]
    assert main(generate) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert asked == []
    assert main([*generate, "--tokenizer", "s3://my/data"]) == 2
    assert asked == ["s3://my/data/tokenizer.json"]
