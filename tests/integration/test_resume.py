"""A run that is stopped at any moment and continued ends as if nothing had happened."""

import math
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from anlit.checkpoints.location import SHARDED
from anlit.cli import main
from tests.integration import conftest
from tests.integration.cases import slow, slow_cases
from tests.integration.conftest import (
    KILLED,
    Train,
    callback,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
)
from tests.integration.ranks import BACKGROUND, DDP, FSDP, run_ranks, start_ranks, wait_for_ranks
from tests.integration.run_files import file_names, lines_with, steps, tensorboard_steps

INTERRUPTED, PREEMPTED = 1, 75
BASE = ("--trainer.max_steps=25", "--trainer.val_check_interval=10")
NO_CHECKPOINTS = "--checkpoint_every_n_steps=1000"
ACCUMULATED = (
    "--data.batch_size=1",
    "--trainer.accumulate_grad_batches=3",
    "--trainer.val_check_interval=5",
    NO_CHECKPOINTS,
    "--trainer.max_steps=12",
    "--model.dropout=0.1",
    "--data.context_schedule={0: 16, 10: 32}",
    "--model.schedule.warmup=0.3",
)
EPOCHS = (
    "--data.batch_size=1",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.limit_train_batches=8",
    NO_CHECKPOINTS,
    "--trainer.val_check_interval=3",
    "--trainer.max_steps=12",
)
GUARDED = (
    *BASE,
    "--trainer.callbacks+=LossGuard",
    "--trainer.callbacks.on_spike=skip",
    "--trainer.callbacks.window=16",
    "--trainer.callbacks+=tests.training.poison.Poison",
    "--trainer.callbacks.batches=[12,20]",
)
DROPOUT = ("--trainer.limit_val_batches=0", "--model.dropout=0.1")
RANKS = ("--trainer.max_steps=6", "--checkpoint_every_n_steps=3", *DROPOUT)


def killed_in(owner: str, name: str, call: int) -> list[str]:
    return callback("integration.callbacks.KilledIn", owner=f"anlit.{owner}", name=name, call=call)


class Case(NamedTuple):
    """A run that is stopped: settings, flags that stop it, exit code, step of its checkpoint."""

    settings: tuple[str, ...]
    stop: list[str]
    code: int
    saved_step: int
    model: str = "AnGPT"
    n_ranks: int = 1


WORKERS = ["--data.num_workers=2"]
WITH_WORKERS = "interrupted, with workers"
WRITE = "checkpoints.checkpoint_io.AtomicCheckpointIO"
CASES = {
    "killed between two checkpoints": Case(BASE, signal_at("SIGKILL", 19), KILLED, 16),
    "preempted where a validation is due": Case(BASE, signal_at("SIGTERM", 9), PREEMPTED, 10),
    WITH_WORKERS: Case(BASE, signal_at("SIGINT", 11), INTERRUPTED, 12),
    "a checkpoint without its row": Case(
        BASE, killed_in("training.loggers.MetricsCSV", "log_metrics", 18), KILLED, 16
    ),
    "dropout, accumulation, a context schedule, warm-up": Case(
        ACCUMULATED, signal_at("SIGKILL", 25), KILLED, 5, "GPT"
    ),
    "in float64": Case(
        (*BASE, "--trainer.precision=64-true"), signal_at("SIGTERM", 11), PREEMPTED, 12
    ),
    "after skipped steps": Case(GUARDED, signal_at("SIGINT", 16), INTERRUPTED, 17),
    "two ranks, one is signalled": Case(
        (*RANKS, *FSDP), signal_at("SIGUSR1", 2, 1), PREEMPTED, 4, n_ranks=2
    ),
    "a shard without its metadata": Case(
        (*RANKS, *FSDP), killed_in("checkpoints.sharded", "give_name", 2), KILLED, 3, n_ranks=2
    ),
}
SLOW_CASES = {
    # test_samples.py kills a run there too.
    "a validation without a checkpoint": Case(
        BASE, killed_in(WRITE, "save_checkpoint", 2), KILLED, 8
    ),
    "killed at the last step": Case(BASE, signal_at("SIGKILL", 24), KILLED, 24),
    "interrupted at the last step": Case(BASE, signal_at("SIGINT", 24), INTERRUPTED, 25),
    "preempted by Slurm": Case(
        (*BASE, NO_CHECKPOINTS), signal_at("SIGUSR1", 12), PREEMPTED, 13, "NGPT"
    ),
    "rows without a checkpoint": Case(BASE, killed_in(WRITE, "save_checkpoint", 4), KILLED, 10),
    "killed at the end of an epoch": Case(EPOCHS, signal_at("SIGKILL", 6), KILLED, 3),
    "ddp": Case((*RANKS, *DDP), signal_at("SIGTERM", 2, 1), PREEMPTED, 4, n_ranks=2),
    "fsdp, rank 0": Case((*RANKS, *FSDP), signal_at("SIGTERM", 2, 0), PREEMPTED, 4, n_ranks=2),
    "in the background": Case(
        (*RANKS, *BACKGROUND), signal_at("SIGTERM", 2, 1), PREEMPTED, 4, n_ranks=2
    ),
    "before the metadata is written": Case(
        (*RANKS, *FSDP), killed_in("checkpoints.sharded", "write_durably", 2), KILLED, 3, n_ranks=2
    ),
    "before the name changes": Case(
        (*RANKS, *FSDP), killed_in("checkpoints.sharded", "_publish", 2), KILLED, 3, n_ranks=2
    ),
}


@pytest.mark.parametrize("name", [*CASES, *slow_cases(SLOW_CASES)])
def test_stopped_and_continued_is_identical(
    shards: Path, tmp_path: Path, trained: Train, name: str
) -> None:
    case = (CASES | SLOW_CASES)[name]
    whole = trained(*case.settings, model=case.model, n_ranks=case.n_ranks)
    cut = tmp_path / "cut"
    workers = WORKERS if name == WITH_WORKERS else []  # they change no number
    arguments = fit_arguments(shards, cut, *case.settings, *workers, model=case.model)

    checkpoint = conftest.stop_and_continue(
        arguments, cut, whole, case.stop, case.code, case.n_ranks
    )

    assert checkpoint["global_step"] == case.saved_step
    if case.settings == GUARDED:
        guard = last_checkpoint(whole)["callbacks"]["LossGuard"]
        assert last_checkpoint(cut)["callbacks"]["LossGuard"] == guard
        assert guard["skipped"] == 2
        assert all(map(math.isfinite, guard["losses"]))


@pytest.mark.parametrize(
    ("in_import", "in_validation"), [("SIGTERM", "SIGUSR1"), *slow_cases([("SIGUSR1", "SIGTERM")])]
)
def test_a_signal_with_nothing_to_save_asks_to_be_started_again(
    shards: Path, tmp_path: Path, monkeypatch, finished: Path, in_import: str, in_validation: str
) -> None:
    """The signal comes during imports, or in `anlit validate`: Lightning would exit with 0."""
    (tmp_path / "preempting.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), signal.{in_import})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    validate = ["validate", f"--config={finished}/config.yaml", *signal_at(in_validation, 1)]

    assert run(fit_arguments(shards, tmp_path / "run", "--import=preempting")) == PREEMPTED
    assert run(validate) == PREEMPTED


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (killed_in("checkpoints.checkpoint_io", "give_name", 1), [".partial-last.ckpt"]),
        *slow_cases([(signal_at("SIGKILL", 2), [])]),
    ],
)
def test_a_run_killed_before_its_first_checkpoint_starts_again_and_prints_it(
    shards: Path, tmp_path: Path, stop: list[str], left: list[str], capfd
) -> None:
    """A partial file is not a checkpoint. Studies and the demo always use `--ckpt_path last`."""
    run_dir = tmp_path / "run"
    arguments = fit_arguments(shards, run_dir, "--trainer.max_steps=3", "--ckpt_path=last")
    checkpoints = run_dir / "checkpoints"
    assert run([*arguments, "--trainer.limit_val_batches=0", *stop]) == KILLED
    assert [file.name for file in checkpoints.glob("*")] == left

    # TensorBoard sorts its files by the second and the process number in their names. This process
    # has the lower number, and a command never starts within the second of another one's end.
    time.sleep(1)
    assert main(arguments) == 0

    sentence = "was stopped before its first checkpoint was complete: it starts again at step 0"
    assert capfd.readouterr().out.count(sentence) == 1
    assert steps(run_dir, "train/loss") == [0, 1, 2]
    assert tensorboard_steps(run_dir, "train/loss") == [0, 1, 2]
    assert last_checkpoint(run_dir)["global_step"] == 3
    assert file_names(checkpoints) == {"last.ckpt", "best.ckpt"}


@slow
@pytest.mark.parametrize(
    ("n_ranks", "strategy", "times"),
    [(1, [], 20), (2, FSDP, 6), (2, BACKGROUND, 6)],
    ids=["one", "fsdp", "background"],
)
def test_killed_at_random_moments_and_continued_is_identical(
    shards: Path, tmp_path: Path, trained: Train, n_ranks: int, strategy: list[str], times: int
) -> None:
    """A checkpoint each step, so most kills come while a checkpoint is being written."""
    settings = ("--trainer.max_steps=60", "--checkpoint_every_n_steps=1", *DROPOUT, *strategy)
    whole = trained(*settings, n_ranks=n_ranks)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, "--ckpt_path=last")
    chance = random.Random(5)
    for step in sorted(chance.sample(range(2, 50), times)):
        processes = start_ranks(arguments, n_ranks)
        while conftest.steps_logged(cut) < step:
            assert processes[0].is_alive()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        # All before the first is waited for: a rank that sees another gone ends by itself.
        for process in processes:
            process.kill()
        assert wait_for_ranks(processes) == [KILLED] * n_ranks
        assert last_checkpoint(cut)["global_step"] >= (step if n_ranks == 1 else 1)
    assert run_ranks(arguments, n_ranks) == [0] * n_ranks
    conftest.assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert len([*(cut / "checkpoints" / SHARDED).glob("*")]) == n_ranks - 1


@pytest.mark.parametrize(("earlier", "later"), [(3, 2), *slow_cases([(2, 4)])])
def test_continued_with_another_accumulation_every_step_is_whole(
    shards: Path, tmp_path: Path, trained: Train, capfd, earlier: int, later: int
) -> None:
    """Micro-batches have the numbers of an undisturbed run: random numbers depend on them."""
    both = ("--data.batch_size=1", NO_CHECKPOINTS, "--trainer.val_check_interval=3")
    accumulated = "--trainer.accumulate_grad_batches="
    first = trained(*both, f"{accumulated}{earlier}", "--trainer.max_steps=5")
    run_dir = shutil.copytree(first, tmp_path / "run")
    more = (f"{accumulated}{later}", "--ckpt_path=last", "--trainer.max_steps=7")
    numbers = "--trainer.callbacks+=tests.integration.callbacks.Numbers"
    capfd.readouterr()

    assert main(fit_arguments(shards, run_dir, *both, *more, numbers)) == 0

    expected = []
    for step in (5, 6):
        for number in range(later):
            expected.append(f"micro-batch {step} {later * step + number}")
    assert lines_with(capfd.readouterr().out, "micro-batch") == expected
    assert last_checkpoint(run_dir)["TokenShards"]["drawn"] == 5 * earlier + 2 * later
    assert steps(run_dir, "train/loss") == [*range(7)]
