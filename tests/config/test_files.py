"""Shipped configurations are found by name, from any folder, in a clone and in a wheel.

Local files come first.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.config.files import FOLDER, configuration_file
from anlit.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["model/gpt.yaml", "configs/model/gpt.yaml"])
def test_a_shipped_file_is_found_by_its_name(name: str) -> None:
    assert configuration_file(name) == str(FOLDER / "model" / "gpt.yaml")


def test_a_local_file_comes_first() -> None:
    Path("model").mkdir()
    Path("model/gpt.yaml").write_text("model: {class_path: anlit.GPT}\n")

    assert configuration_file("model/gpt.yaml") == "model/gpt.yaml"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model/angtp.yaml", r"model/angtp.yaml does not exist.*did you mean model/angpt.yaml\?"),
        ("fsdp.yaml", r"fsdp.yaml does not exist.*did you mean trainer/fsdp.yaml\?"),
        ("../configs/model/gpt.yaml", "does not exist"),
        ("/dev/null", "/dev/null is not a regular file"),
    ],
)
def test_an_unknown_name_is_refused_with_the_fix(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"--config .*{sentence}"):
        configuration_file(name)


FILES = ["--config=model/gpt.yaml", "--config", "data/python.yaml", "-c", "small.yaml"]
LATER_FILE = "--config=later.yaml"
OPTION = "--trainer.max_steps=5"


@pytest.mark.parametrize("arguments", [[OPTION, *FILES, LATER_FILE], [*FILES, LATER_FILE, OPTION]])
def test_an_option_wins_over_a_file_wherever_it_stands(
    printed_config: Callable[..., Any], arguments: list[str]
) -> None:
    Path("small.yaml").write_text("trainer: {max_steps: 25, log_every_n_steps: 5}\n")
    Path("later.yaml").write_text("trainer: {max_steps: 30, log_every_n_steps: 7}\n")

    config = printed_config(*arguments)

    assert config["model"]["class_path"] == "anlit.GPT"
    assert config["data"]["init_args"]["path"] == "data/python"
    assert config["trainer"]["max_steps"] == 5
    assert config["trainer"]["log_every_n_steps"] == 7


def test_no_shipped_file_validates_on_the_beginning_of_a_split() -> None:
    limits = {}
    for path in FOLDER.rglob("*.yaml"):
        trainer = yaml.safe_load(path.read_text()).get("trainer", {})
        if trainer.get("limit_val_batches"):
            limits[path.stem] = trainer["limit_val_batches"]

    assert limits == {"needle": 1.0}


@pytest.fixture
def unpacked_wheel(tmp_path: Path) -> Path:
    """The content of a wheel of this repository."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", str(ROOT), "-w", str(tmp_path)]
    subprocess.run(build, check=True)
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(next(tmp_path.glob("anlit-*.whl"))).extractall(folder)
    return folder


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*.*")}


@pytest.mark.slow
def test_a_wheel_brings_the_configurations_along(tmp_path: Path, unpacked_wheel: Path) -> None:
    names = {path.name for path in unpacked_wheel.iterdir() if path.suffix != ".dist-info"}

    assert names == {"anlit"}
    assert files_below(unpacked_wheel / "anlit" / "configs") == files_below(ROOT / "configs")
    environment = os.environ | {"PYTHONPATH": str(unpacked_wheel)}
    for arguments, expected in (
        ("fit --config model/angpt.yaml --data=PythonSources --print_config", "anlit.AnGPT"),
        ("study --config study/convergence.yaml --budget cpu --dry_run", "estimate:"),
    ):
        command = [sys.executable, "-m", "anlit", *arguments.split()]
        output = subprocess.check_output(command, text=True, cwd=tmp_path, env=environment)
        assert expected in output
