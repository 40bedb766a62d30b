"""Shipped configurations are found by name, in a clone and from a wheel, from any folder; local files come first."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from anlit.config.files import FOLDER, configuration_file
from anlit.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_local_file_comes_first() -> None:
    for name in ("model/gpt.yaml", "configs/model/gpt.yaml"):  # the second as in the repository
        assert configuration_file(name) == str(FOLDER / "model" / "gpt.yaml")
    Path("model").mkdir()
    Path("model/gpt.yaml").write_text("model: {class_path: anlit.GPT}\n")
    assert configuration_file("model/gpt.yaml") == "model/gpt.yaml"


def test_unknown_name_is_refused_with_the_fix() -> None:
    with pytest.raises(
        UserError,
        match=r"--config model/angtp.yaml does not exist.*did you mean model/angpt.yaml\?",
    ):
        configuration_file("model/angtp.yaml")
    with pytest.raises(UserError, match="does not exist"):
        configuration_file("../configs/model/gpt.yaml")


def test_an_option_wins_over_a_file_wherever_it_stands(printed_config) -> None:
    Path("small.yaml").write_text("trainer: {max_steps: 25, log_every_n_steps: 5}\n")
    Path("later.yaml").write_text("trainer: {max_steps: 30, log_every_n_steps: 7}\n")
    files = ["--config=model/gpt.yaml", "--config", "data/python.yaml", "-c", "small.yaml"]
    option = ["--trainer.max_steps", "5"]
    for given in (
        [*option, *files, "--config", "later.yaml"],
        [*files, "--config=later.yaml", *option],
    ):
        config = printed_config(*given)
        assert config["model"]["class_path"] == "anlit.GPT"
        assert config["data"]["init_args"]["path"] == "data/python"
        assert (config["trainer"]["max_steps"], config["trainer"]["log_every_n_steps"]) == (5, 7)


def test_no_shipped_file_validates_on_the_beginning_of_a_split() -> None:
    files = {path: yaml.safe_load(path.read_text()) for path in FOLDER.rglob("*.yaml")}
    limits = {
        path.stem: content.get("trainer", {}).get("limit_val_batches")
        for path, content in files.items()
    }
    assert {name: limit for name, limit in limits.items() if limit} == {"needle": 1.0}


@pytest.mark.slow
def test_a_wheel_brings_the_configurations_along(tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", str(ROOT), "-w", str(tmp_path)], check=True
    )
    zipfile.ZipFile(next(tmp_path.glob("anlit-*.whl"))).extractall(unpacked)
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {
        "anlit"
    }
    folders = (ROOT / "configs", unpacked / "anlit" / "configs")
    shipped, carried = (
        {path.relative_to(folder) for path in folder.rglob("*.*")} for folder in folders
    )
    assert carried == shipped
    for typed, expected in (
        ("fit --config model/angpt.yaml --data=PythonSources --print_config", "anlit.AnGPT"),
        ("study --config study/convergence.yaml --budget cpu --dry_run", "estimate:"),
    ):
        anlit, environment = (
            [sys.executable, "-m", "anlit"],
            os.environ | {"PYTHONPATH": str(unpacked)},
        )
        said = subprocess.check_output(
            [*anlit, *typed.split()], text=True, cwd=tmp_path, env=environment
        )
        assert expected in said
