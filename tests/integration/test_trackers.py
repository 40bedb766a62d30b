"""Runs with a logger of an experiment tracker: W&B, MLflow, Comet. The tracker is a stand-in."""

import importlib.machinery
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from anlit import packages
from anlit.cli import main
from anlit.config import trackers
from tests.integration.conftest import fit_arguments, last_checkpoint, run
from tests.integration.run_files import config_of, file_names, lines_with

FILE = "tests.integration.test_trackers"


class WandbLogger(DummyLogger):
    """Stands in for Lightning's, with what anlit gives it. It writes nothing."""

    made: tuple[Any, ...] = ()

    def __init__(
        self,
        name: str | None = None,
        save_dir: str = ".",
        id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        WandbLogger.made = (name, kwargs)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    monkeypatch.setattr(packages, "find_spec", lambda name: found)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "made"),
    [
        ([], ("wide", {})),
        (["--tags=a,b"], ("wide", {"tags": ["a", "b"]})),
        (["--tags=a", "--trainer.logger.name=mine"], ("mine", {"tags": ["a"]})),
    ],
)
def test_wandb_gets_name_and_tags(
    shards: Path, tmp_path: Path, options: list[str], made: Any
) -> None:
    logger = ["--name=wide", "--trainer.max_steps=1", f"--trainer.logger={FILE}.WandbLogger"]

    assert main(fit_arguments(shards, tmp_path, *logger, *options)) == 0

    assert WandbLogger.made == made
    logger_settings = config_of(tmp_path)["trainer"]["logger"]
    assert logger_settings.get("dict_kwargs") is None


@pytest.mark.slow
def test_a_continued_run_has_one_id_in_wandb(shards: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make extras EXTRAS=wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    for n_steps, more in ((2, []), (4, ["--ckpt_path=last"])):
        arguments = ("--config=logger/wandb.yaml", f"--trainer.max_steps={n_steps}", *more)
        assert run(fit_arguments(shards, folder, *arguments)) == 0
    first, second = (folder / "wandb").glob("offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    files = (folder / "wandb").rglob("*.wandb")
    assert any(b"train/loss" in file.read_bytes() for file in files)
    assert len(list(folder.glob("events.out.tfevents.*[!s]"))) == 2  # beside the settings' own
    assert (folder / "metrics.csv").is_file()


MISSING = [
    ("--trainer.logger=MLFlowLogger", "MLFlowLogger needs mlflow: pip install mlflow"),
    ("--trainer.logger+=CometLogger", "CometLogger needs comet_ml: pip install comet_ml"),
    ("--config=logger/wandb.yaml", "WandbLogger needs wandb: run `make extras EXTRAS=wandb`"),
]


@pytest.mark.parametrize(("option", "sentence"), MISSING)
def test_a_tracker_without_its_package_is_refused_and_leaves_nothing(
    shards: Path, tmp_path: Path, monkeypatch, refusal, option: str, sentence: str
) -> None:
    """W&B writes a folder `wandb` into the working directory, which Python can import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in trackers.PACKAGES.values():
        monkeypatch.setitem(__import__("sys").modules, package, None)
        monkeypatch.delitem(__import__("sys").modules, package)
        (tmp_path / package).mkdir()

    assert sentence in refusal(*fit_arguments(shards, tmp_path / "run", option))

    assert file_names(tmp_path) == {*trackers.PACKAGES.values()}


def test_settings_that_only_an_installed_package_has_are_not_called_unknown(
    shards: Path, tmp_path: Path, monkeypatch, refusal
) -> None:
    """Lightning's logger takes those of wandb.init."""
    monkeypatch.setattr(trackers, "is_installed", lambda package: False)
    path = "lightning.pytorch.loggers.WandbLogger"
    logger = (f"--trainer.logger={path}", "--trainer.logger.entity=us")

    error = refusal(*fit_arguments(shards, tmp_path / "run", *logger))

    assert "trainer.logger=WandbLogger needs wandb: run" in error


class Refusing(CSVLogger):
    def __init__(self, save_dir: str = ".") -> None:
        raise ValueError("the tracker requires\nan API key")


@pytest.mark.parametrize("option", ["--trainer.logger", "--trainer.logger+"])
def test_what_a_logger_refuses_is_told_in_its_own_words(
    shards: Path, tmp_path: Path, refusal, option: str
) -> None:
    error = refusal(*fit_arguments(shards, tmp_path / "run", f"{option}={FILE}.Refusing"))

    assert error.endswith("the tracker requires an API key")
    assert file_names(tmp_path) == set()


class UsageError(Exception):
    """As wandb's, without a login."""


UsageError.__module__ = "wandb.errors"


class Failing(CSVLogger):
    """Has a server that ends in the third step."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step == 2:
            try:
                raise ConnectionResetError(104, "Connection reset by peer")
            except OSError as error:
                raise UsageError("the server does not answer") from error
        super().log_metrics(metrics, step)


def test_a_tracker_that_fails_in_a_run_is_named(shards: Path, tmp_path: Path, capfd) -> None:
    """The run ends in order, and continues without the tracker."""
    logger = (f"--trainer.logger={FILE}.Failing", f"--trainer.logger.save_dir={tmp_path}")
    settings = ("--trainer.max_steps=6",)
    arguments = fit_arguments(shards, tmp_path / "run", *settings)
    capfd.readouterr()

    assert main([*arguments, *logger]) == 1

    (line,) = lines_with(capfd.readouterr().err, "anlit: error")
    assert last_checkpoint(tmp_path / "run")["global_step"] == 4
    assert line == (
        "anlit: error: wandb fails (the server does not answer): correct that, or leave its "
        "logger out of trainer.logger, then continue with --ckpt_path last"
    )
    assert main([*arguments, "--ckpt_path=last"]) == 0


class NotLoggedIn(CSVLogger):
    def log_hyperparams(self, *settings: Any) -> None:
        raise UsageError("no login")


def test_a_tracker_that_fails_at_the_start_is_named(shards: Path, tmp_path: Path, capfd) -> None:
    logger = (f"--trainer.logger={FILE}.NotLoggedIn", f"--trainer.logger.save_dir={tmp_path}")

    assert main(fit_arguments(shards, tmp_path / "run", *logger)) == 1

    (line,) = lines_with(capfd.readouterr().err, "anlit: error")
    assert line.startswith("anlit: error: wandb fails (no login): correct that, or leave its")


@pytest.mark.usefixtures("installed")
def test_an_evaluation_does_not_use_the_loggers_of_the_run(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    """Its machine may lack their packages, and a tracker would get a run without a name."""
    monkeypatch.chdir(tmp_path)
    logger = (f"--trainer.logger={FILE}.WandbLogger", "--trainer.max_steps=1")
    run_dir = tmp_path / "run"
    assert main(fit_arguments(shards, run_dir, *logger)) == 0
    WandbLogger.made = ()

    assert main(["validate", str(run_dir)]) == 0
    assert main(["validate", f"--config={run_dir}/config.yaml"]) == 0
    assert WandbLogger.made == ()

    shutil.copy(run_dir / "config.yaml", tmp_path)
    checkpoint = f"--ckpt_path={run_dir}/checkpoints/last.ckpt"
    assert main(["validate", f"--config={tmp_path}/config.yaml", checkpoint]) == 0
    assert WandbLogger.made != (), "it is not in a run folder"


@pytest.mark.usefixtures("installed")
def test_a_refused_start_leaves_no_id_of_wandb(shards: Path, tmp_path: Path, refusal) -> None:
    logger = (f"--trainer.logger={FILE}.WandbLogger", "--data.batch_size=100000")

    assert "batch_size" in refusal(*fit_arguments(shards, tmp_path / "run", *logger))

    assert file_names(tmp_path) == set()
