"""Data do not depend on how Python starts processes: `fork`, `forkserver` (3.14) or `spawn`."""

import multiprocessing
import multiprocessing.context
import re
from pathlib import Path
from typing import Any

import pytest

from anlit.cli import main
from tests.data.layouts import openwebtext, short_documents
from tests.data.preparing import SIZES, make, recipe_of, record_times
from tests.integration.conftest import Train, fit_arguments
from tests.integration.ranks import run_ranks_with_logs
from tests.integration.run_files import column
from tests.integration.test_signals import PREEMPTED, signalled
from tests.integration.test_users_data import MINE, fit

OTHER_METHODS = ["forkserver", "spawn"]


@pytest.fixture(params=OTHER_METHODS)
def default_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Python's default way to start a process, as in 3.14 or on another system."""
    methods = [request.param]
    methods += [name for name in multiprocessing.get_all_start_methods() if name != request.param]
    default_context: Any = multiprocessing.context._default_context
    context = multiprocessing.get_context(request.param)
    monkeypatch.setattr(default_context, "_default_context", context)
    monkeypatch.setattr(default_context, "_actual_context", None)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    return request.param


def test_preparation_by_two_workers_makes_the_same_folder(
    tmp_path: Path, shards: Path, default_method: str
) -> None:
    openwebtext(tmp_path / "hub", short_documents(50, seed=1), n_files=4, row_group_size=4)
    tokenizer = str(shards / "tokenizer.json")
    recipe = recipe_of(
        "OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2
    )

    manifests = [make(tmp_path / str(workers), recipe, workers) for workers in (1, 2)]

    assert len(record_times(tmp_path / "2")) > 1, "two workers have two tasks"
    assert manifests[1]["content_sha256"] == manifests[0]["content_sha256"]


def test_workers_of_shards_deliver_the_same_batches_and_continue(
    tmp_path: Path, shards: Path, trained: Train, default_method: str
) -> None:
    constant = ("--model.schedule=Constant", "--trainer.max_steps=20")
    run = tmp_path / "run"
    arguments = fit_arguments(shards, run, *constant, "--data.num_workers=2")

    assert main([*arguments, "--trainer.max_steps=9"]) == 0
    assert main([*arguments, "--ckpt_path=last"]) == 0

    losses = column(run, "train/loss")
    assert len(losses) == 20
    assert losses == column(trained(*constant), "train/loss")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_function_that_cannot_be_pickled_collates_in_workers(
    tmp_path: Path, default_method: str, num_workers: int
) -> None:
    """A method of the data module refers to the module, which refers to the Trainer."""
    settings = [f"--data.num_workers={num_workers}", "--model.vocab_size=64"]

    assert main(fit(f"{MINE}.Collated", *settings, f"--run_dir={tmp_path / 'run'}")) == 0

    assert len(column(tmp_path / "run", "train/loss")) == 13


def test_a_start_method_that_the_user_chose_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--data.start_method=spawn", "--model.vocab_size=64"]

    assert main(fit(f"{MINE}.Collated", *settings, f"--run_dir={tmp_path / 'run'}")) == 1

    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"anlit: error: a data worker cannot be sent what its DataLoader has \(", error)
    assert error.endswith("at the top of a module, or leave multiprocessing_context out")


def test_sigterm_to_the_group_saves_though_the_users_loader_has_workers(tmp_path: Path) -> None:
    stop = signalled("SIGTERM", "the group", "between two micro-batches")
    settings = ["--model.vocab_size=64", f"--run_dir={tmp_path / 'run'}", *stop]

    codes, (log,) = run_ranks_with_logs(fit(f"{MINE}.Collated", *settings), 1, tmp_path / "log")

    assert codes == [PREEMPTED], log
    assert "Stopped after step 6 and saved" in log
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
