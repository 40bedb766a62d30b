"""The noise scale of the gradient and the ramp of the batch, from the command line."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.runs.folders import load_run
from tests.integration.cases import slow, slow_cases
from tests.integration.conftest import (
    KILLED,
    Train,
    assert_identical,
    assert_same_training_state,
    callback,
    fit_arguments,
    last_checkpoint,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import DDP, FSDP
from tests.integration.run_files import column, config_of, logged, steps, tensorboard_steps

TOKENS = 2 * 32
"""Tokens of a micro-batch, of two sequences."""
SCALE, SIGNAL, TRACE = "noise/scale", "noise/squared_gradient", "noise/trace"
NOISE = (
    "--config=trainer/noise_scale.yaml",
    "--trainer.callbacks.every_n_steps=2",
    "--trainer.max_steps=8",
    "--data.score_first_token=false",
    "--model.optimizer.eps=1e-6",
)
TWO_MICRO_BATCHES = ("--data.batch_size=2", "--trainer.accumulate_grad_batches=2")
RAMP = (
    "--trainer.callbacks+=BatchRamp",
    "--trainer.callbacks.schedule={0: 1, 3: 2, 6: 4}",
    "--trainer.accumulate_grad_batches=4",
    "--data.batch_size=2",
)
SIZES = [1, 1, 1, 2, 2, 2, 4, 4, 4]
"""Micro-batches of each step."""
STEP_TOKENS = [TOKENS * n_micro_batches for n_micro_batches in SIZES]
RUN_TOKENS = [*itertools.accumulate(STEP_TOKENS)]
"""Tokens of the run after each step."""
CONSTANT = ("--model.schedule=Constant", "--model.optimizer.eps=1e-6")
RUN = (
    *RAMP,
    *CONSTANT,
    "--trainer.callbacks+=GradientNoiseScale",
    "--trainer.callbacks.every_n_steps=1",
    "--trainer.max_steps=9",
    "--trainer.val_check_interval=4",
    "--checkpoint_every_n_steps=1",
)
"""A run with a ramp that is measured at every step."""


def test_the_fragment_logs_the_noise_scale(trained: Train) -> None:
    folder = trained(*NOISE, *TWO_MICRO_BATCHES, model="NGPT")

    scales = dict(logged(folder, SCALE))
    assert steps(folder, SIGNAL) == steps(folder, TRACE) == [1, 3, 5, 7]
    assert tensorboard_steps(folder, TRACE) == [1, 3, 5, 7]
    assert min(column(folder, TRACE)) > 0
    for step, signal, trace in zip(
        steps(folder, SIGNAL), column(folder, SIGNAL), column(folder, TRACE), strict=True
    ):
        assert (step in scales) == (signal > 0)
        if signal > 0:
            assert float(scales[step]) == pytest.approx(trace / signal, rel=1e-6)


def test_the_noise_scale_changes_nothing(trained: Train) -> None:
    plain = trained(*NOISE[2:], *TWO_MICRO_BATCHES, model="NGPT")
    measured = trained(*NOISE, *TWO_MICRO_BATCHES, model="NGPT")

    assert_same_training_state(last_checkpoint(plain), last_checkpoint(measured))


@pytest.mark.parametrize(
    ("n_ranks", "micro_batches", "strategy"),
    [(2, 1, DDP), *slow_cases([(2, 2, DDP)]), (2, 2, FSDP)],
)
def test_ranks_measure_what_micro_batches_do(
    trained: Train, n_ranks: int, micro_batches: int, strategy: list[str]
) -> None:
    """Ranks of FSDP2 share a micro-batch; each rank of DDP has another."""
    n_gradients = micro_batches if strategy == FSDP else n_ranks * micro_batches
    whole = trained(
        *NOISE,
        f"--data.batch_size={4 // n_gradients}",
        f"--trainer.accumulate_grad_batches={n_gradients}",
        model="NGPT",
    )

    split = trained(
        *NOISE,
        f"--data.batch_size={4 // n_ranks // micro_batches}",
        f"--trainer.accumulate_grad_batches={micro_batches}",
        *strategy,
        model="NGPT",
        n_ranks=n_ranks,
    )

    for name in (SIGNAL, TRACE):
        assert column(split, name) == pytest.approx(column(whole, name), rel=1e-4), name


def test_a_ramp_takes_the_planned_tokens(trained: Train) -> None:
    folder = trained(*RUN)

    assert column(folder, "train/tokens") == RUN_TOKENS
    assert column(folder, "train/batch_tokens") == STEP_TOKENS
    assert steps(folder, "val/loss") == [3, 7, 8]
    curve = load_run(folder).curve
    assert curve.tokens.tolist() == [RUN_TOKENS[3], RUN_TOKENS[7], RUN_TOKENS[8]]


def test_the_steps_of_a_ramp_are_those_of_runs_with_their_batch(
    trained: Train, shards: Path, tmp_path: Path
) -> None:
    """The batches are powers of two, so nothing is rounded."""
    ramp = trained(*RUN)
    run_dir = tmp_path / "run"
    for n_micro_batches, n_steps in ((1, 3), (2, 6), (4, 9)):
        arguments = fit_arguments(
            shards,
            run_dir,
            *CONSTANT,
            "--data.batch_size=2",
            f"--trainer.accumulate_grad_batches={n_micro_batches}",
            f"--trainer.max_steps={n_steps}",
            "--ckpt_path=last",
        )
        assert main(arguments) == 0

    weights = last_checkpoint(run_dir)["state_dict"]
    assert_identical(weights, last_checkpoint(ramp)["state_dict"], "weights")
    assert column(run_dir, "train/loss") == column(ramp, "train/loss")


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_ramp_like_one_process(trained: Train, strategy: list[str]) -> None:
    whole = trained(*RUN)

    split = trained(*RUN, "--data.batch_size=1", *strategy, n_ranks=2)

    assert column(split, "train/tokens") == RUN_TOKENS
    for name in ("train/loss", "train/grad_norm"):
        assert column(split, name) == pytest.approx(column(whole, name), rel=1e-4), name
    # Ranks of DDP are micro-batches too, so steps of a single micro-batch are measured.
    n_measured = 9 if strategy == DDP else 6
    assert len(column(split, TRACE)) == n_measured


EPOCHS = ("--trainer.limit_train_batches=12", "--model.dropout=0.1")
"""Micro-batches of an epoch, as many as three of the largest steps have."""
FOURTH_SAVE = callback(
    "integration.callbacks.KilledIn",
    owner="anlit.checkpoints.checkpoint_io.AtomicCheckpointIO",
    name="save_checkpoint",
    call=4,
)


@pytest.mark.parametrize(
    ("settings", "stop", "saved_step"),
    [
        pytest.param(EPOCHS, FOURTH_SAVE, 3, id="at the end of an epoch"),
        # test_together.py kills another run within its ramp.
        pytest.param((), signal_at("SIGKILL", 4 * 4), 4, id="within the ramp", marks=slow),
    ],
)
def test_a_run_is_killed_in_its_ramp_and_continued(
    trained: Train,
    shards: Path,
    tmp_path: Path,
    settings: tuple[str, ...],
    stop: list[str],
    saved_step: int,
) -> None:
    whole = trained(*RUN, *settings)
    cut = tmp_path / "cut"

    checkpoint = stop_and_continue(
        fit_arguments(shards, cut, *RUN, *settings), cut, whole, stop, KILLED
    )

    assert checkpoint["global_step"] == saved_step
    noise = last_checkpoint(whole)["callbacks"]["GradientNoiseScale"]
    assert last_checkpoint(cut)["callbacks"]["GradientNoiseScale"] == noise
    assert noise["weight"] == pytest.approx(1 - 0.95**6), "steps of one micro-batch do not count"
    for name in (SIGNAL, TRACE, SCALE):
        assert logged(cut, name) == logged(whole, name)


@pytest.mark.parametrize(("budget", "n_steps"), [*slow_cases([(420, 4)]), (1100, 8)])
def test_a_budget_of_tokens_counts_the_ramp(
    shards: Path, tmp_path: Path, capfd, budget: int, n_steps: int
) -> None:
    """The rate falls over the tokens."""
    run_dir = tmp_path / "run"
    options = ("--trainer.max_steps=-1", f"--max_tokens={budget}", "--model.schedule=Linear")

    assert main(fit_arguments(shards, run_dir, *RAMP, *options, "--model.schedule.final=0")) == 0

    assert RUN_TOKENS[n_steps - 1] <= budget < RUN_TOKENS[n_steps]
    assert config_of(run_dir)["trainer"]["max_steps"] == n_steps
    tokens = column(run_dir, "train/tokens")
    assert tokens == RUN_TOKENS[:n_steps]
    largest = TOKENS * SIZES[n_steps - 1]
    assert f"{budget:,} tokens: {n_steps} steps of 64 to {largest} tok" in capfd.readouterr().out
    rates = column(run_dir, "train/learning_rate")
    tokens_before = [0, *tokens[:-1]]
    expected = [rates[0] * (1 - before / tokens_before[-1]) for before in tokens_before]
    assert rates == pytest.approx(expected, rel=1e-5, abs=1e-12)


WRONG = [
    (
        ["--trainer.callbacks+=GradientNoiseScale"],
        "compares a step with its micro-batches, and it has only one: set "
        "--trainer.accumulate_grad_batches 2",
    ),
    (
        ["--trainer.callbacks+=GradientNoiseScale", "--trainer.callbacks.decay=1.0"],
        "GradientNoiseScale has decay=1.0: give 0 or more and less than 1",
    ),
    (
        ["--trainer.callbacks+=GradientNoiseScale", "--trainer.callbacks.every_n_steps=0"],
        "GradientNoiseScale has every_n_steps=0: it must be at least 1",
    ),
    (
        [*RAMP, "--trainer.accumulate_grad_batches=2"],
        "ends with 4, and trainer.accumulate_grad_batches=2: end with the largest step, and set "
        "--trainer.accumulate_grad_batches 4",
    ),
    ([*RAMP, "--trainer.callbacks.schedule={1: 4}"], "and 0 as the first step"),
    ([*RAMP, "--trainer.callbacks.schedule={0: 0, 5: 4}"], "give the micro-batches, 1 or more"),
    ([*RAMP, "--trainer.callbacks.schedule={0: 8, 5: 4}"], "end with the largest step"),
    ([*RAMP, "--trainer.callbacks.schedule={}"], "and 0 as the first step"),
    (
        [*RAMP, "--trainer.callbacks.schedule=4"],
        "trainer.callbacks.schedule=4 is of the wrong type",
    ),
    ([*RAMP, "--trainer.max_epochs=2"], "trainer.max_epochs=2 counts passes through the data"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_a_mistake_is_one_sentence(
    shards: Path, tmp_path: Path, refusal, options: Sequence[str], words: str
) -> None:
    assert words in refusal(*fit_arguments(shards, tmp_path / "run", *options))
