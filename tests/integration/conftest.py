"""A small prepared corpus, finished runs for several tests, and runs that stop and continue."""

import csv
import shutil
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import keystr, tree_flatten_with_path

from anlit import TextFiles
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.location import SHARDED
from anlit.cli import main
from tests.checkpoints.foreign import trained as train_in
from tests.integration.ranks import run_ranks
from tests.integration.run_files import file_names, logged, record_of, steps

VOCABULARY = 320
STEPS = 40
"""Steps of a run by default."""
CURVES = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "val/loss")
STATE = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
KILLED = -signal.SIGKILL
Train = Callable[..., Path]
SHAPE = {"vocab_size": 320, "context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16}
TINY: dict[str, Any] = {
    "model": {"class_path": "anlit.GPT", "init_args": SHAPE},
    "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "data", "batch_size": 2}},
    "trainer": {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False},
    "run_dir": "new",
}


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Shards of the standard library's `json` and `email`, 320 tokens in the vocabulary."""
    source = tmp_path_factory.mktemp("source")
    path = tmp_path_factory.mktemp("data") / "shards"
    for package in ("json", "email"):
        for file in (Path(sysconfig.get_path("stdlib")) / package).glob("*.py"):
            shutil.copy(file, source / f"{package}_{file.name}")
    data = TextFiles(
        str(source), pattern="*.py", vocab_size=VOCABULARY, val_fraction=0.2, path=str(path)
    )
    data.prepare_data()
    return path


def fit_arguments(shards: Path, run_dir: Path, *extra: str, model: str = "AnGPT") -> list[str]:
    """The command line of a tiny run: 2 layers, width 32, a step every batch, logged every step."""
    return [
        "fit",
        f"--model={model}",
        f"--model.vocab_size={VOCABULARY}",
        "--model.context_length=32",
        "--model.n_layers=2",
        "--model.n_heads=2",
        "--model.d_model=32",
        "--data=TokenShards",
        f"--data.path={shards}",
        "--data.batch_size=4",
        "--trainer.accelerator=cpu",
        f"--trainer.max_steps={STEPS}",
        "--trainer.log_every_n_steps=1",
        "--trainer.val_check_interval=17",
        "--trainer.limit_val_batches=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--checkpoint_every_n_steps=8",
        f"--run_dir={run_dir}",
        *extra,
    ]


@pytest.fixture(scope="session")
def trained(shards: Path, tmp_path_factory) -> Train:
    """`trained(*settings, model=, n_ranks=, data=, code=)` → the folder of a run.

    Each run is trained once, so tests change copies. A run that ends well on a single rank is
    trained in this process. That saves the start of another process.
    """
    folders: dict[tuple, Path] = {}

    def train(
        *extra: str, model: str = "AnGPT", n_ranks: int = 1, data: Path = shards, code: int = 0
    ) -> Path:
        key = (extra, model, n_ranks, data)
        if key not in folders:
            run_dir = tmp_path_factory.mktemp("runs") / "run"
            arguments = fit_arguments(data, run_dir, *extra, model=model)
            if n_ranks == 1 and code == 0:
                assert main(arguments) == 0
            else:
                assert run_ranks(arguments, n_ranks) == [code] * n_ranks
            folders[key] = run_dir
        return folders[key]

    return train


@pytest.fixture(scope="session")
def finished(trained: Train) -> Path:
    """An anGPT after 20 steps, validated after 17 and at the end. Tests change copies of it."""
    return trained("--trainer.max_steps=20")


def run(arguments: list[str]) -> int | None:
    """Run `anlit` in a child process, and return its exit code."""
    return run_ranks(arguments, 1)[0]


def signal_at(name: str, batch: int, rank: int | None = None) -> list[str]:
    """Flags that send a signal to all ranks, or to `rank`, when micro-batch `batch` begins."""
    return callback("integration.callbacks.AtBatch", event=name, batch=batch, rank=rank)


def callback(name: str, /, **settings: object) -> list[str]:
    """Flags that give a run the callback tests.`name`. A setting of None is left out."""
    flags = [f"--trainer.callbacks+=tests.{name}"]
    for key, value in settings.items():
        if value is not None:
            flags.append(f"--trainer.callbacks.{key}={value}")
    return flags


def stop_and_continue(
    arguments: list[str],
    cut: Path,
    whole: Path,
    stop: list[str],
    code: int = KILLED,
    n_ranks: int = 1,
) -> dict[str, Any]:
    """Stop a run and continue it; its folder then has all that an undisturbed run's folder has.

    Weights, optimizer and schedule are the same to the bit. Each row of its curves is there once.

    Args:
        arguments: The command line of the run.
        cut: Its folder.
        whole: The folder of a run that was never stopped.
        stop: Further flags that stop the run.
        code: The exit code of the stopped run.

    Returns:
        The last checkpoint of the stopped run.
    """
    codes = run_ranks([*arguments, *stop], n_ranks)
    is_killed = code == KILLED and codes[0] == code and codes[-1] != 0
    assert codes == [code] * n_ranks or is_killed
    status = "running" if code == KILLED else "interrupted"
    assert record_of(cut)["status"] == status
    checkpoint = last_checkpoint(cut)
    if status == "interrupted":
        validations = logged(cut, "val/loss")
        n_due = sum(step < checkpoint["global_step"] for step in steps(whole, "val/loss"))
        assert validations == logged(whole, "val/loss")[:n_due], "a due one precedes the stop"

    assert run_ranks([*arguments, "--ckpt_path=last"], n_ranks) == [0] * n_ranks

    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert_same_curves(whole, cut)
    assert_no_leftovers(cut / "checkpoints")
    return checkpoint


def assert_same_curves(whole: Path, cut: Path) -> None:
    """Both runs have the same rows in metrics.csv, and `cut` the same steps in TensorBoard."""
    events = EventAccumulator(str(cut)).Reload()
    for name in CURVES:
        rows = logged(cut, name)
        assert logged(whole, name) == rows
        if rows:
            shown = [event.step for event in events.Scalars(name)]
            assert shown == steps(cut, name)


def assert_no_leftovers(checkpoints: Path) -> None:
    """Every file is a checkpoint, and every sharded folder belongs to a checkpoint."""
    targets = {path.resolve() for path in checkpoints.glob("*.ckpt")}
    assert file_names(checkpoints) <= {"last.ckpt", "best.ckpt", SHARDED}
    for folder in (checkpoints / SHARDED).glob("*"):
        assert folder.resolve() in targets


def steps_logged(run_dir: Path) -> int:
    """The last step in metrics.csv, -1 before the first. The run may be writing its last line."""
    path = run_dir / "metrics.csv"
    last_step = -1
    if path.is_file():
        complete_lines = path.read_text().rpartition("\n")[0].splitlines()
        for row in csv.DictReader(complete_lines):
            last_step = int(row["step"] or last_step)
    return last_step


def last_checkpoint(run_dir: Path) -> dict:
    return read_checkpoint(run_dir / "checkpoints" / "last.ckpt")


def assert_same_training_state(first: dict, second: dict) -> None:
    """Weights, optimizer, schedule and step are identical to the bit."""
    for entry in STATE:
        assert_identical(first[entry], second[entry], entry)


def assert_identical(first: object, second: object, label: str) -> None:
    """Two trees of tensors and values have the same form, and are equal to the bit."""
    first_leaves, first_form = tree_flatten_with_path(first)
    second_leaves, second_form = tree_flatten_with_path(second)
    assert first_form == second_form, label
    for (path, a), (_, b) in zip(first_leaves, second_leaves, strict=True):
        assert type(a) is type(b), keystr(path)
        is_equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert is_equal, f"{label}{keystr(path)}"


@pytest.fixture(scope="session")
def trained_place(tmp_path_factory) -> Path:
    working_folder = tmp_path_factory.mktemp("settings")
    train_in(working_folder, "GPT")
    return working_folder


@pytest.fixture
def working_folder(trained_place: Path, tmp_path: Path, monkeypatch) -> Path:
    """A working directory with `data`, `run` and tiny.yaml."""
    for name in ("data", "run"):
        (tmp_path / name).symlink_to(trained_place / name)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value_at(config: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config
