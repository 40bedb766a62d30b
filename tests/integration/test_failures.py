"""A run that fails ends on every rank, in a sentence, and leaves a good checkpoint."""

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from anlit import GPT
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.location import SHARDED
from anlit.cli import main
from anlit.errors import UserError
from anlit.training.callbacks import FiniteCheckpoints
from tests.data.processes import PATIENCE_S, members, wait_for
from tests.integration.cases import slow, slow_cases
from tests.integration.conftest import KILLED, callback, fit_arguments, last_checkpoint, signal_at
from tests.integration.ranks import (
    BACKGROUND,
    DDP,
    FSDP,
    run_ranks,
    run_ranks_with_logs,
    start_ranks,
    wait_for_ranks,
)
from tests.integration.run_files import column, file_names, lines_with, record_of
from tests.nn.models.tiny import fit, tiny

ROOT = Path(__file__).parents[2]
STRATEGIES = pytest.mark.parametrize("strategy", [*slow_cases([DDP]), FSDP], ids=["ddp", "fsdp"])


def errors(output: str) -> list[str]:
    assert "Traceback" not in output
    return lines_with(output, "anlit: error: ")


def has_any(phrases: Sequence[str], text: str) -> bool:
    return any(phrase in text for phrase in phrases)


GRADIENT, POISON = "training.poison.PoisonGradient", "training.poison.Poison"
BY_VALUE = ["--trainer.callbacks.value=.inf", "--trainer.gradient_clip_algorithm=value"]


@pytest.mark.parametrize(
    ("step", "settings", "says"),
    [
        (
            9,
            callback(GRADIENT, step=9),
            "the gradient became NaN or infinite at step 10: lower the learning rate",
        ),
        (
            11,
            [*callback(GRADIENT, step=11), *BY_VALUE],
            "the gradient became NaN or infinite at step 12",
        ),
        (
            9,
            callback(POISON, batches="[9]"),
            "the training loss became NaN or infinite at step 10: lower the learning",
        ),
        (
            9,
            callback(GRADIENT, step=9, spoils_weight="true"),
            "weights or optimizer state became NaN or infinite by step 10 (1 tensors)",
        ),
    ],
)
def test_no_checkpoint_has_numbers_that_are_not_finite(
    shards: Path, tmp_path: Path, step: int, settings: list[str], says: str, capfd
) -> None:
    """Step 9 (from 0) precedes a checkpoint, step 11 is the last."""
    run_dir = tmp_path / "run"
    steps = (
        "--trainer.val_check_interval=5",
        "--trainer.max_steps=12",
        "--checkpoint_every_n_steps=100",
    )
    assert main(fit_arguments(shards, run_dir, *settings, *steps)) == 2
    (error,) = errors(capfd.readouterr().err)
    assert says in error
    assert error.endswith(f"the last good checkpoint is {run_dir}/checkpoints/last.ckpt")
    for name in ("last", "best"):
        content = read_checkpoint(run_dir / "checkpoints" / f"{name}.ckpt")
        assert content["global_step"] == (5 if step == 9 else 10)
        for tensor in content["state_dict"].values():
            assert torch.isfinite(tensor).all()
    assert record_of(run_dir)["status"] == "failed"


def test_a_run_that_diverges_at_its_first_step_keeps_its_folder(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    assert main(fit_arguments(shards, run_dir, *callback(GRADIENT, step=0))) == 2

    assert "NaN or infinite at step 1" in capsys.readouterr().err
    assert record_of(run_dir)["status"] == "failed"


def test_training_does_not_start_from_bad_weights() -> None:
    model = tiny(GPT)
    with torch.no_grad():
        model.model.head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="that training starts from are NaN or infinite"):
        fit(model, 1, callbacks=[FiniteCheckpoints()])


@STRATEGIES
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(
            callback("integration.callbacks.Refuses", in_constructor=True, rank=0),
            "this rank alone refuses",
            marks=slow,
        ),
        (
            callback("integration.callbacks.Refuses", in_constructor=True, rank=1),
            "this rank alone refuses",
        ),
        (
            callback("integration.callbacks.Refuses", in_constructor=False, rank=1),
            "this rank alone refuses",
        ),
        (
            callback(POISON, batches="[3]", rank=1),
            "became NaN or infinite at step 4: lower the learning",
        ),
        (
            [*FSDP, "--trainer.strategy.replicas=3"],
            "trainer.strategy.replicas=3 does not divide the number of ranks",
        ),
    ],
    ids=[
        "0, at first",
        "1, at first",
        "1, in setup",
        "1, a loss of NaN",
        "replicas that do not divide",
    ],
)
def test_where_one_rank_refuses_all_end_in_a_sentence(
    shards: Path, tmp_path: Path, flags: list[str], says: str, strategy: list[str]
) -> None:
    arguments = fit_arguments(shards, tmp_path / "run", *strategy, *flags, "--trainer.max_steps=6")
    codes, output = run_ranks_with_logs(arguments, 2, tmp_path / "log")

    assert codes == [2, 2]
    lines = errors("".join(output))
    assert len(lines) == len(set(lines)), "a sentence is printed once"
    for line in lines:
        assert says in line
    if POISON not in flags[0]:  # a rank finds its loss, the other its gradient
        assert len(lines) == 1


def test_ranks_with_mistakes_of_their_own_all_say_them(shards: Path, tmp_path: Path) -> None:
    refuses = callback("integration.callbacks.RefusesOnEachRank")
    arguments = fit_arguments(shards, tmp_path / "run", *DDP, *refuses)

    codes, output = run_ranks_with_logs(arguments, 3, tmp_path / "log")

    assert codes == [2, 2, 2]
    for rank in range(3):
        (error,) = errors(output[rank])
        assert f"rank {rank} refuses" in error


def test_a_rank_that_another_ends_has_no_error_of_its_own(shards: Path, tmp_path: Path) -> None:
    """The rank that refuses in `setup` is gone while the other, waiting for it, still ends."""
    refuses = callback("integration.callbacks.Refuses", in_constructor=False, rank=1)
    late = callback("integration.callbacks.EndsLate", rank=0)
    arguments = fit_arguments(shards, tmp_path / "run", *FSDP, *refuses, *late)

    codes, output = run_ranks_with_logs(arguments, 2, tmp_path / "log")

    assert codes == [2, 2]
    assert errors(output[0]) == []
    assert "this rank alone refuses" in output[1]


def test_the_reason_of_a_refusal_is_printed_before_the_launcher_ends_the_ranks(
    shards: Path, tmp_path: Path
) -> None:
    """torchrun sends SIGTERM to all ranks when the first of them has ended."""
    refuses = callback("integration.callbacks.Refuses", in_constructor=False, rank=0)
    log = tmp_path / "log"
    processes = start_ranks(fit_arguments(shards, tmp_path / "run", *DDP, *refuses), 3, log)
    wait([process.sentinel for process in processes], PATIENCE_S)
    for process in processes:
        process.terminate()

    codes = wait_for_ranks(processes)

    assert codes == [2, 2, 2]
    output = [Path(f"{log}.{rank}").read_text() for rank in range(3)]
    (error,) = errors("".join(output))
    assert "this rank alone refuses" in error


@slow
@STRATEGIES
def test_all_ranks_skip_what_one_of_them_saw(
    shards: Path, tmp_path: Path, strategy: list[str]
) -> None:
    guard = [
        "--trainer.callbacks+=LossGuard",
        "--trainer.callbacks.on_spike=skip",
        "--trainer.callbacks.window=16",
    ]
    bad = callback(POISON, batches="[3]", rank=1)
    short = ["--trainer.max_steps=6", "--trainer.limit_val_batches=0"]
    arguments = fit_arguments(shards, tmp_path, *guard, *bad, *short, *strategy)

    assert run_ranks(arguments, 2) == [0, 0]

    assert column(tmp_path, "guard/skipped") == [0, 0, 0, 1, 1, 1]


@STRATEGIES
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=slow)])
def test_a_killed_rank_ends_the_other(
    shards: Path, tmp_path: Path, strategy: list[str], killed: int
) -> None:
    arguments = fit_arguments(
        shards, tmp_path / "run", *strategy, *signal_at("SIGKILL", 11, killed)
    )
    codes, output = run_ranks_with_logs(arguments, 2, tmp_path / "log")
    assert codes[killed] == KILLED
    assert codes[1 - killed] not in (None, 0, 75)
    assert has_any(["onnection closed by peer", "onnection reset by peer"], output[1 - killed])


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        pytest.param([], None, id="one"),
        pytest.param(FSDP, 1, id="fsdp-1"),
        pytest.param(FSDP, 0, id="fsdp-0", marks=slow),
        pytest.param(BACKGROUND, 1, id="background-1", marks=slow),
        pytest.param(BACKGROUND, 0, id="background-0", marks=slow),
        pytest.param(DDP, 0, id="ddp-0", marks=slow),
    ],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_checkpoint(
    shards: Path, tmp_path: Path, strategy: list[str], rank: int | None
) -> None:
    """Checkpoints are due after steps 8, 16 and 24. From step 10 on the disks are full."""
    run_dir = tmp_path / "run"
    steps = ("--trainer.max_steps=24", "--trainer.val_check_interval=1000")
    arguments = fit_arguments(shards, run_dir, *steps, *signal_at("full disk", 10, rank), *strategy)
    codes, output = run_ranks_with_logs(arguments, 2 if strategy else 1, tmp_path / "log")
    assert codes[0] == 1
    assert codes[-1] in ((1, 2) if strategy == DDP else (1,))
    error, *further_errors = errors("".join(output))
    for phrase in (
        "last.ckpt could not be written",
        "File too large",
        "then continue with --ckpt_path last",
    ):
        assert phrase in error
    if strategy != DDP:  # there the other rank loses the writing rank
        assert not further_errors, "one rank speaks for all"
    record = record_of(run_dir)
    assert record["status"] == "failed"
    assert "File too large" in record["error"]
    assert last_checkpoint(run_dir)["global_step"] == 8
    names = file_names(run_dir / "checkpoints")
    assert names == {"last.ckpt", *([SHARDED] if strategy and strategy != DDP else [])}
    assert len([*(run_dir / "checkpoints" / SHARDED).glob("*")]) == len(names) - 1


@slow
@STRATEGIES
@pytest.mark.parametrize(("end", "rank"), [("SIGTERM", 0), ("SIGKILL", 1)])
def test_one_command_leaves_no_rank_behind(
    shards: Path, tmp_path: Path, strategy, end: str, rank: int
) -> None:
    """A user starts a command in a new session, and Lightning starts the other rank."""
    run_dir = tmp_path / "run"
    arguments = fit_arguments(
        shards, run_dir, *strategy, *signal_at(end, 11, rank), "--trainer.devices=2"
    )
    command = [sys.executable, "-m", "anlit", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    _, output = process.communicate(timeout=600)
    if end == "SIGTERM":
        assert process.returncode == 75, output
        assert last_checkpoint(run_dir)["global_step"] == 13
    else:
        assert process.returncode in (1, KILLED), output
        assert has_any(["closed by peer", "reset by peer", "Child process"], output)
    wait_for(lambda: members(process.pid) == [])
