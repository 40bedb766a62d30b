"""A small corpus prepared once, and `anlit fit` in a child process that can be killed."""

import csv
import itertools
import multiprocessing
import os
import shutil
import signal
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from anlit import TextFiles
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main

VOCABULARY = 320
STEPS = 40  # of a run that is not told otherwise


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the standard library's `json` and `email` packages, 320 tokens in the vocabulary."""
    source, path = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("data") / "shards"
    for package in ("json", "email"):
        for file in (Path(sysconfig.get_path("stdlib")) / package).glob("*.py"):
            shutil.copy(file, source / f"{package}_{file.name}")
    data = TextFiles(str(source), pattern="*.py", vocab_size=VOCABULARY, val_fraction=0.2, path=str(path))
    data.prepare_data()
    return path


def fit_arguments(shards: Path, run_dir: Path, *extra: str, model: str = "AnGPT") -> list[str]:
    """A tiny run's command line: 2 layers, width 32, one optimizer step every batch, logged every step."""
    return [
        "fit", f"--model={model}", f"--model.vocab_size={VOCABULARY}", "--model.context_length=32",
        "--model.n_layers=2", "--model.n_heads=2", "--model.d_model=32",
        "--data=TokenShards", f"--data.path={shards}", "--data.batch_size=4",
        "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1",
        "--trainer.val_check_interval=17", "--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false", "--checkpoint_every_n_steps=8", f"--run_dir={run_dir}", *extra,
    ]  # fmt: skip


@pytest.fixture(scope="session")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An anGPT after 20 steps, validated after 17 and at the end. Tests change copies of it."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(fit_arguments(shards, run_dir, "--trainer.max_steps=20")) == 0
    return run_dir


def start(arguments: list[str]) -> multiprocessing.Process:
    """`anlit` in a forked child, which inherits what is already imported."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(arguments,))
    process.start()
    return process


def _run(arguments: list[str]) -> None:
    raise SystemExit(main(arguments))


def run(arguments: list[str]) -> int | None:
    """`anlit` in a child process; its exit code."""
    process = start(arguments)
    process.join(240)
    return process.exitcode


def die_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Let a process kill itself when it calls `owner.name` for the `call`-th time."""
    original, number = getattr(owner, name), itertools.count(1)

    def deadly(*arguments: Any, **settings: Any) -> Any:
        if next(number) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, deadly)


def steps_logged(run_dir: Path) -> int:
    """The last step in metrics.csv, -1 before the first."""
    path = run_dir / "metrics.csv"
    if not path.is_file():
        return -1
    whole, _, _ = path.read_text().rpartition("\n")  # the run may be writing its last line
    return max((int(row["step"]) for row in csv.DictReader(whole.splitlines()) if row.get("step")), default=-1)


def logged(run_dir: Path, name: str) -> list[tuple[int, str]]:
    """The steps and values of one metric in metrics.csv, in the order of the file."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row[name]) for row in csv.DictReader(file) if row.get(name)]


def last_checkpoint(run_dir: Path) -> dict:
    return read_checkpoint(run_dir / "checkpoints" / "last.ckpt")


def assert_same_training_state(one: dict, two: dict) -> None:
    """Weights, optimizer, schedule and step are identical to the bit."""
    assert one["global_step"] == two["global_step"]
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_identical(one[key], two[key], key)


def assert_identical(one: object, two: object, where: str) -> None:
    assert type(one) is type(two), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_identical(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_identical(a, b, f"{where}[{index}]")
    else:
        assert one == two, where


@pytest.fixture(autouse=True)
def _seeded() -> None:
    L.seed_everything(0, verbose=False)
