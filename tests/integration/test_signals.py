"""A signal at any time ends a run in order. The continued run has the same weights."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.signals import leave_signals_to_parent
from tests.data.processes import PATIENCE_S, finish, members, start, wait_for
from tests.integration import conftest
from tests.integration.cases import slow_cases
from tests.integration.conftest import (
    Train,
    callback,
    fit_arguments,
    last_checkpoint,
    run,
    steps_logged,
)
from tests.integration.ranks import DDP, run_ranks_with_logs
from tests.integration.run_files import steps

INTERRUPTED, PREEMPTED = 1, 75
SETTINGS = (
    "--data.batch_size=2",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.val_check_interval=4",
    "--trainer.max_steps=7",
    "--checkpoint_every_n_steps=1000",
    "--model.dropout=0.1",
)
SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1")
TARGETS = {
    "the process": {"group": False},
    "the group": {"group": True},
    "one of two ranks": {"group": False, "rank": 1},
    "the group of one of two ranks": {"group": True, "rank": 1},
    "the groups of two ranks": {"group": True},
}
MOMENTS = {
    "in the first step": ("train", 0),
    "between two micro-batches": ("train", 5),
    "in validation": ("validate", 1),
}
CHECKPOINT_STEPS = {"in the first step": 1, "between two micro-batches": 3, "in validation": 4}
"""The step of the checkpoint of a single rank. Two ranks stop a step later."""


def signalled(name: str, target: str, moment: str) -> list[str]:
    stage, batch = MOMENTS[moment]
    return callback(
        "integration.callbacks.Signalled", name=name, stage=stage, batch=batch, **TARGETS[target]
    )


def assert_ends_in_order(
    shards: Path,
    tmp_path: Path,
    trained: Train,
    printed: Callable[[], str],
    *case: str,
    workers: int,
) -> None:
    name, target, moment = case
    n_ranks = 2 if "two ranks" in target else 1
    strategy = DDP if n_ranks == 2 else []
    whole = trained(*SETTINGS, *strategy, n_ranks=n_ranks)
    arguments = fit_arguments(
        shards, tmp_path / "cut", *SETTINGS, *strategy, f"--data.num_workers={workers}"
    )
    code = INTERRUPTED if name == "SIGINT" else PREEMPTED
    printed()
    checkpoint = conftest.stop_and_continue(
        arguments, tmp_path / "cut", whole, signalled(*case), code, n_ranks
    )
    assert checkpoint["global_step"] == CHECKPOINT_STEPS[moment] + n_ranks - 1
    assert "error" not in printed()


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """printed() → the text that was printed since the last call."""
    return lambda: "".join(capfd.readouterr())


def test_sigterm_to_the_group_saves_though_there_are_data_workers(
    shards: Path, tmp_path: Path
) -> None:
    """A user starts it, and scancel, `timeout` or a cloud ends it."""
    stop = signalled("SIGTERM", "the group", "between two micro-batches")
    run_dir = tmp_path / "run"
    arguments = fit_arguments(shards, run_dir, *SETTINGS, "--data.num_workers=2", *stop)

    codes, (log,) = run_ranks_with_logs(arguments, 1, tmp_path / "log")

    assert codes == [PREEMPTED]
    assert log.splitlines()[-1] == (
        "Stopped after step 3 and saved: the same command with --ckpt_path last continues"
    )
    assert "rror" not in log
    assert last_checkpoint(run_dir)["global_step"] == 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_a_run_in_order(
    shards: Path,
    tmp_path: Path,
    trained: Train,
    printed: Callable[[], str],
    name: str,
    target: str,
    moment: str,
    workers: int,
) -> None:
    case = (name, target, moment)
    assert_ends_in_order(shards, tmp_path, trained, printed, *case, workers=workers)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", PREEMPTED), ("SIGINT", 130)])
def test_a_signal_to_one_rank_before_training_ends_both(
    shards: Path, tmp_path: Path, name: str, code: int
) -> None:
    """Otherwise the other rank would wait for half an hour."""
    stop = callback("integration.callbacks.SignalledWhenMade", rank=1, name=name)
    arguments = fit_arguments(shards, tmp_path / "run", *SETTINGS, *DDP, *stop)
    codes, _ = run_ranks_with_logs(arguments, 2, tmp_path / "log")
    assert codes == [code, code]


def run_under_nohup(arguments: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(main(arguments))


def test_a_closed_terminal_does_not_end_a_run_under_nohup(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    hangup = signalled("SIGHUP", "the process", "in the first step")
    arguments = fit_arguments(shards, tmp_path / "run", *SETTINGS, *hangup)
    process = start(partial(run_under_nohup, arguments), trains=True)
    assert finish(process) == 0
    assert last_checkpoint(tmp_path / "run")["global_step"] == 7


@pytest.mark.parametrize("n_presses", [3, *slow_cases([2])])
def test_the_third_ctrl_c_is_one_too_many(
    shards: Path, tmp_path: Path, printed: Callable[[], str], n_presses: int
) -> None:
    """All come in step 3. Two save it, and the third ends the run before the step is complete."""
    presses = n_presses * signalled("SIGINT", "the process", "between two micro-batches")
    run_dir = tmp_path / "run"

    assert run(fit_arguments(shards, run_dir, *SETTINGS, *presses)) == INTERRUPTED

    text = printed()
    assert "Traceback" not in text
    assert "Ctrl-C once more ends it without saving" in text
    assert (run_dir / "checkpoints" / "last.ckpt").exists() is (n_presses == 2)
    assert main(fit_arguments(shards, run_dir, *SETTINGS, "--ckpt_path=last")) == 0


@pytest.mark.parametrize(("name", "code"), [("SIGINT", INTERRUPTED), ("SIGTERM", PREEMPTED)])
def test_ctrl_c_after_the_checkpoint_changes_nothing(
    shards: Path, tmp_path: Path, printed: Callable[[], str], name: str, code: int
) -> None:
    logger = "--trainer.logger=tests.integration.callbacks.InterruptedAtItsEnd"
    stop = signalled(name, "the process", "between two micro-batches")
    run_dir = tmp_path / "run"
    arguments = fit_arguments(shards, run_dir, *SETTINGS, logger, *stop)

    assert run([*arguments, f"--trainer.logger.save_dir={tmp_path}"]) == code

    text = printed()
    assert "Stopped after step 3 and saved" in text
    assert "error" not in text
    assert "without saving" not in text


def test_a_killed_run_leaves_no_data_worker(shards: Path, tmp_path: Path) -> None:
    endless = ("--trainer.max_steps=100000", "--trainer.limit_val_batches=0")
    arguments = fit_arguments(shards, tmp_path / "run", "--data.num_workers=2", *endless)
    process = start(partial(main, arguments), trains=True)
    wait_for(lambda: steps_logged(tmp_path / "run") > 2)
    assert len(members(process.pid)) == 3
    process.kill()
    process.join()
    wait_for(lambda: members(process.pid) == [])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_child_heeds_no_signal_but_its_parent_s_sigterm(name: str) -> None:
    """DataLoader and multiprocessing end a child that hangs by SIGTERM."""
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()

    def hang() -> None:
        leave_signals_to_parent()
        is_ready.set()
        time.sleep(600)

    child = context.Process(target=hang)
    child.start()
    assert is_ready.wait(PATIENCE_S)
    number = str(child.pid)
    subprocess.run(["/bin/kill", "-s", name.removeprefix("SIG"), number], check=True)
    child.join(0.3)  # a child that heeds the signal ends at once
    assert child.is_alive()
    child.terminate()
    child.join(PATIENCE_S)
    assert child.exitcode == 0


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


OUTPUTS = {
    "a reader that has gone, as of `| head`": closed_pipe,
    "a full disk": partial(os.open, "/dev/full", os.O_WRONLY),
    "nothing": None,
}


def run_without_output(arguments: list[str], output: str) -> None:
    make_output = OUTPUTS[output]
    if make_output is None:  # a shell's `>&- 2>&-`
        sys.stdout = sys.stderr = None
    else:
        file = make_output()
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = main(arguments)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # as Python does at its end
    raise SystemExit(code)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_goes_on_without_its_output(shards: Path, tmp_path: Path, output: str) -> None:
    arguments = fit_arguments(shards, tmp_path / "run", *SETTINGS)
    arguments.remove("--trainer.enable_progress_bar=false")
    process = start(partial(run_without_output, arguments, output), trains=True)
    assert finish(process) == 0
    assert last_checkpoint(tmp_path / "run")["global_step"] == 7
    assert steps(tmp_path / "run", "train/loss") == [*range(7)]
