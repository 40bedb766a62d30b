"""A study of two arms. A stand-in trains its runs in milliseconds, without a model."""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import pyplot as plt

from anlit.commands import study as command
from anlit.compare import plots
from anlit.study import launch
from anlit.study.grid import GridPoint
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from anlit.study.results import read_tunings, select_points
from anlit.study.sections import annealed, convergence, loss_gap, scaling, trend, tried_losses
from tests.compare.conftest import keep_figures  # noqa: F401
from tests.data import processes

STAND_IN = Path(__file__).with_name("stand_in.py")
TUNE = {"model.init_args.lr": [0.1, 0.2, 0.4]}
GPT_ARM = {"title": "GPT+", "configs": ["gpt.yaml"]}
ANGPT_ARM = {"title": "anGPT", "configs": ["angpt.yaml"]}
UNTUNED_ARMS = {"gpt": GPT_ARM, "angpt": ANGPT_ARM}
OTHER_BLOCKS = {"settings": {"data.init_args.val_blocks": 64}}
"""An arm with them has the loss of other tokens."""
ARMS_ON_OTHER_TOKENS = UNTUNED_ARMS | {"angpt": ANGPT_ARM | OTHER_BLOCKS}


def arms_with(**changes: Any) -> dict[str, Any]:
    """The two arms, both with the changes."""
    return {name: arm | changes for name, arm in UNTUNED_ARMS.items()}


def shared_with(settings: dict[str, Any], *files: str) -> dict[str, Any]:
    """What all arms share, with settings and further configuration files."""
    return {"configs": ["common.yaml", *files], "settings": settings}


ARMS = arms_with(tune=TUNE)
STUDY = {
    "title": "Two arms",
    "question": "Which one?",
    "baseline": "gpt",
    "arms": ARMS,
    "seeds": [1, 2, 3],
    "shared": {"configs": ["common.yaml"]},
    "sections": ["convergence", "tuning"],
}
Launch = Callable[..., "Process"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the configuration files that the study names."""
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    return tmp_path


def write_configs(folder: Path) -> None:
    for name in ("GPT", "AnGPT"):
        model = f"model: {{class_path: anlit.{name}, init_args: {{d_model: 128, n_layers: 4}}}}"
        (folder / f"{name.lower()}.yaml").write_text(model)
    common = "data: {init_args: {batch_size: 8}}\ntrainer: {max_steps: 400}\n"
    (folder / "common.yaml").write_text(
        common + "model: {init_args: {vocab_size: 1024, context_length: 256}}"
    )


def write_study(folder: Path, **changes: Any) -> str:
    """`STUDY` with changes, a key that is None left out, as a file; its path."""
    content = STUDY | changes
    for key, value in changes.items():
        if value is None:
            del content[key]
    (folder / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "study.yaml"


def changed_study(folder: Path, **changes: Any) -> Study:
    """`STUDY` with changes, read from its file."""
    return read_study(write_study(folder, **changes), None)


@pytest.fixture
def study(folder: Path) -> Study:
    return changed_study(folder)


def attributes(items: Iterable[Any], name: str) -> list[Any]:
    """An attribute of each run, point or arm."""
    return list(map(attrgetter(name), items))


def first_points(study: Study) -> dict[str, GridPoint]:
    """The first point of each arm, by arm name."""
    return {arm.name: arm.points[0] for arm in study.arms}


def best_points(study: Study, output: Path) -> dict[str, GridPoint]:
    """The points to measure by the runs in a folder, by arm name."""
    return select_points(study, read_tunings(study, output))


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn and not saved, which takes most of the time of a report."""
    for module in (plots, annealed, loss_gap, scaling, trend, tried_losses):
        monkeypatch.setattr(module, "save", _close)


def _close(figure: Any, path: Path) -> None:
    plt.close(figure)


class Process:
    """`anlit study` with the stand-in, forked, so that it starts at once.

    It is the leader of a new process group.
    """

    def __init__(self, arguments: list[str], step: float, log: Path) -> None:
        self.log = log
        log.unlink(missing_ok=True)
        self.forked = processes.start(partial(self._run, arguments, step), log)

    def _run(self, arguments: list[str], step: float) -> None:
        launch.POLL_SECONDS = 0.01
        # It takes most of the time; test_report.py has the pictures.
        convergence.plot_convergence = _do_nothing
        # It needs torch, and the stand-in's runs have no model.
        command.measure_step_times = _do_nothing
        # The stand-in has settings that `anlit fit` does not have.
        command.check_study = _do_nothing
        interpreter = [sys.executable, "-S", str(STAND_IN), str(step)]
        launch.fit_command = lambda run, folder: [*interpreter, *run.options(folder)]
        raise SystemExit(command.main(arguments))

    def wait(self, seconds: float = processes.PATIENCE_S) -> int | None:
        """The exit code, None if it has not ended by then."""
        self.forked.join(seconds)
        return self.forked.exitcode

    def kill(self, number: signal.Signals, group: bool = False) -> None:
        send = os.killpg if group else os.kill
        send(self.forked.pid, number)


def _do_nothing(*_: Any) -> None:
    pass


@pytest.fixture
def start(folder: Path) -> Launch:
    """start(options…, step=seconds of a step) → a `Process` with its runs in the folder `out`."""

    def start(*options: str, step: float = 0.002) -> Process:
        arguments = ["--config", "study.yaml", "--output", "out", *options]
        return Process(arguments, step, folder / "log")

    return start
