"""`anlit demo`: which commands it runs. `make demo` runs them for real."""

import json
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.commands import demo


class Commands:
    """Stands in for the processes. A training leaves its record, or fails."""

    def __init__(self, failing: str = "") -> None:
        self.lines: list[str] = []
        self.failing = failing

    def __call__(self, *arguments: str) -> int:
        line = " ".join(arguments)
        self.lines.append(line)
        is_ended = bool(self.failing) and self.failing in line
        if arguments[0] == "fit":
            run_dir = Path(arguments[arguments.index("--run_dir") + 1])
            run_dir.mkdir(parents=True, exist_ok="--ckpt_path" in arguments)
            status = "interrupted" if is_ended else "finished"
            (run_dir / "run.json").write_text(json.dumps({"status": status}))
        return 75 if is_ended else 0


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def run_demo(monkeypatch: pytest.MonkeyPatch, output: Path, commands: Commands) -> int:
    monkeypatch.setattr(demo, "anlit", commands)
    return main(["demo", "--output", str(output)])


def test_it_trains_every_arm_and_compares_them(monkeypatch, output) -> None:
    commands = Commands()

    assert run_demo(monkeypatch, output, commands) == 0

    *trainings, comparison = commands.lines
    arms = ("gpt", "ngpt", "angpt", "angpt-scale-invariant")
    for line, arm in zip(trainings, arms, strict=True):
        assert line.split()[2] == f"experiment/demo/{arm}.yaml"
        assert "--ckpt_path" not in line  # it would say that there is no checkpoint
    assert comparison.startswith("compare ")
    assert comparison.endswith(f"--output {output / 'comparison'} --measure_steps")


def test_a_finished_arm_is_not_trained_again(monkeypatch, output) -> None:
    run_demo(monkeypatch, output, Commands())
    commands = Commands()

    run_demo(monkeypatch, output, commands)

    (line,) = commands.lines
    assert line.startswith("compare ")


def test_it_ends_with_the_exit_code_of_an_arm_that_was_ended(monkeypatch, output) -> None:
    commands = Commands(failing="demo/ngpt.yaml")

    assert run_demo(monkeypatch, output, commands) == 75

    assert len(commands.lines) == 2


def test_an_arm_that_was_ended_goes_on_from_its_last_checkpoint(monkeypatch, output) -> None:
    run_demo(monkeypatch, output, Commands(failing="demo/ngpt.yaml"))
    commands = Commands()

    assert run_demo(monkeypatch, output, commands) == 0

    continued, *new, _ = commands.lines
    assert continued.endswith(f"--run_dir {output / 'ngpt'} --ckpt_path last")
    assert not [line for line in new if "--ckpt_path" in line]
