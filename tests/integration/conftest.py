"""A small corpus prepared once, finished runs that several tests read, and runs that are stopped and continued."""

import csv
import json
import shutil
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import keystr, tree_flatten_with_path

from anlit import TextFiles
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.location import SHARDED
from tests.integration.ranks import logged, run_ranks

VOCABULARY = 320
STEPS = 40  # of a run that is not told otherwise
CURVES = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "val/loss")
STATE = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
KILLED = -signal.SIGKILL
Train = Callable[..., Path]


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Shards of the standard library's `json` and `email` packages, 320 tokens in the vocabulary."""
    source, path = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("data") / "shards"
    for package in ("json", "email"):
        for file in (Path(sysconfig.get_path("stdlib")) / package).glob("*.py"):
            shutil.copy(file, source / f"{package}_{file.name}")
    data = TextFiles(
        str(source), pattern="*.py", vocab_size=VOCABULARY, val_fraction=0.2, path=str(path)
    )
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
def trained(shards: Path, tmp_path_factory) -> Train:
    """`trained(*settings, model=, n_ranks=, data=, code=)` → the folder of a run that is made once: change copies."""
    made: dict[tuple, Path] = {}

    def train(
        *extra: str, model: str = "AnGPT", n_ranks: int = 1, data: Path = shards, code: int = 0
    ) -> Path:
        key = (extra, model, n_ranks, data)
        if key not in made:
            run_dir = tmp_path_factory.mktemp("runs") / "run"
            assert (
                run_ranks(fit_arguments(data, run_dir, *extra, model=model), n_ranks)
                == [code] * n_ranks
            )
            made[key] = run_dir
        return made[key]

    return train


@pytest.fixture(scope="session")
def finished(trained: Train) -> Path:
    """An anGPT after 20 steps, validated after 17 and at the end. Tests change copies of it."""
    return trained("--trainer.max_steps=20")


def run(arguments: list[str]) -> int | None:
    """`anlit` in a child process; its exit code."""
    return run_ranks(arguments, 1)[0]


def signal_at(name: str, batch: int, rank: int | None = None) -> list[str]:
    """Flags that send a signal to a run, or to one rank of it, when micro-batch `batch` (from 0) begins."""
    return callback("integration.callbacks.AtBatch", event=name, batch=batch, rank=rank)


def callback(name: str, /, **settings: object) -> list[str]:
    """Flags that give a run the callback of tests.`name`; a setting of None is left out."""
    flags = (
        f"--trainer.callbacks.{key}={value}" for key, value in settings.items() if value is not None
    )
    return [f"--trainer.callbacks+=tests.{name}", *flags]


def stop_and_continue(
    arguments: list[str],
    cut: Path,
    whole: Path,
    stop: list[str],
    code: int = KILLED,
    n_ranks: int = 1,
) -> dict[str, Any]:
    """Stop the run of `arguments` by the flags `stop`, continue it, and find in its folder all that `whole` has.

    Its weights, optimizer and schedule are the same to the bit, and each row of its curves is there once. Returns the
    checkpoint that was left.
    """
    codes = run_ranks([*arguments, *stop], n_ranks)
    assert codes == [code] * n_ranks or (code == KILLED and codes[0] == code and codes[-1] != 0)
    status = "running" if code == KILLED else "interrupted"
    assert json.loads((cut / "run.json").read_text())["status"] == status
    left = last_checkpoint(cut)
    if status == "interrupted":
        validated = [row for row in logged(whole, "val/loss") if row[0] < left["global_step"]]
        assert logged(cut, "val/loss") == validated, (
            "a validation that is due comes before the stop"
        )
    assert run_ranks([*arguments, "--ckpt_path=last"], n_ranks) == [0] * n_ranks
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    events = EventAccumulator(str(cut)).Reload()
    for name in CURVES:
        assert logged(whole, name) == logged(cut, name)
        if rows := logged(cut, name):
            assert [event.step for event in events.Scalars(name)] == [step for step, _ in rows]
    checkpoints = cut / "checkpoints"
    named = {path.resolve() for path in checkpoints.glob("*.ckpt")}
    assert {path.name for path in checkpoints.iterdir()} <= {"last.ckpt", "best.ckpt", SHARDED}
    assert {path.resolve() for path in (checkpoints / SHARDED).glob("*")} <= named, (
        "what was half-written is gone"
    )
    return left


def steps_logged(run_dir: Path) -> int:
    """The last step in metrics.csv, -1 before the first; the run may be writing its last line."""
    path = run_dir / "metrics.csv"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return max((int(row["step"]) for row in csv.DictReader(whole) if row.get("step")), default=-1)


def last_checkpoint(run_dir: Path) -> dict:
    return read_checkpoint(run_dir / "checkpoints" / "last.ckpt")


def assert_same_training_state(one: dict, two: dict) -> None:
    """Weights, optimizer, schedule and step are identical to the bit."""
    assert_identical(*({key: content[key] for key in STATE} for content in (one, two)), "")


def assert_identical(one: object, two: object, where: str) -> None:
    (leaves, form), (others, other_form) = map(tree_flatten_with_path, (one, two))
    assert form == other_form, where
    for (path, a), (_, b) in zip(leaves, others, strict=True):
        assert type(a) is type(b), keystr(path)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (
            f"{where}{keystr(path)}"
        )
