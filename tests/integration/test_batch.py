"""The noise scale of the gradient and the ramp of the batch, from the command line."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from anlit.cli import main
from anlit.runs.folders import load_run
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
from tests.integration.ranks import DDP, FSDP, column, logged, run_ranks

TOKENS = 32
"""Tokens of a sequence."""
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
RAMP_STEPS = 9
RAMP_TOKENS = [2 * TOKENS * n for n in (1, 2, 3, 5, 7, 9, 13, 17, 21)]
"""The training tokens after each step."""


def test_the_fragment_logs_the_noise_scale(trained: Train) -> None:
    folder = trained(*NOISE, *TWO_MICRO_BATCHES, model="NGPT")

    steps = [step for step, _ in logged(folder, SIGNAL)]
    assert steps == [1, 3, 5, 7]
    for step, value in logged(folder, SCALE):
        row = dict(logged(folder, TRACE))[step], dict(logged(folder, SIGNAL))[step]
        assert float(value) == pytest.approx(float(row[0]) / float(row[1]), rel=1e-6)
    assert min(column(folder, TRACE)) > 0
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars(TRACE)] == steps


def test_the_noise_scale_changes_nothing(trained: Train) -> None:
    settings = [*NOISE[2:], *TWO_MICRO_BATCHES]

    plain = trained(*settings, model="NGPT")
    measured = trained(*NOISE, *TWO_MICRO_BATCHES, model="NGPT")

    assert_same_training_state(last_checkpoint(plain), last_checkpoint(measured))


@pytest.mark.parametrize(
    ("n_ranks", "micro_batches", "strategy"), [(2, 1, DDP), (2, 2, DDP), (2, 2, FSDP)]
)
def test_ranks_measure_what_micro_batches_do(
    trained: Train, n_ranks: int, micro_batches: int, strategy: list[str]
) -> None:
    """With FSDP2 a micro-batch is that of both ranks; with DDP each rank has its own."""
    is_sharded = strategy == FSDP
    n_gradients = micro_batches if is_sharded else n_ranks * micro_batches
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
    folder = trained(*RAMP, f"--trainer.max_steps={RAMP_STEPS}", "--trainer.val_check_interval=4")

    assert column(folder, "train/tokens") == RAMP_TOKENS
    batches = [2 * TOKENS * n for n in (1, 1, 1, 2, 2, 2, 4, 4, 4)]
    assert column(folder, "train/batch_tokens") == batches
    assert [step for step, _ in logged(folder, "val/loss")] == [3, 7, 8]
    curve = load_run(folder).curve
    assert curve.tokens.tolist() == [RAMP_TOKENS[3], RAMP_TOKENS[7], RAMP_TOKENS[8]]


def test_the_steps_of_a_ramp_are_those_of_runs_of_their_batch(
    trained: Train, shards, tmp_path
) -> None:
    """The factors of these batches are powers of two, so nothing is rounded."""
    settings = ("--model.schedule=Constant", "--data.batch_size=2", "--trainer.log_every_n_steps=1")
    ramp = trained(*RAMP, *settings, f"--trainer.max_steps={RAMP_STEPS}")
    run_dir = tmp_path / "run"
    for n_micro_batches, n_steps in ((1, 3), (2, 6), (4, 9)):
        arguments = fit_arguments(
            shards,
            run_dir,
            *settings,
            f"--trainer.accumulate_grad_batches={n_micro_batches}",
            f"--trainer.max_steps={n_steps}",
            "--ckpt_path=last",
        )
        assert run_ranks(arguments, 1) == [0]

    assert_identical(
        last_checkpoint(run_dir)["state_dict"], last_checkpoint(ramp)["state_dict"], "weights"
    )
    assert column(run_dir, "train/loss") == column(ramp, "train/loss")


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_ramp_like_one_process(trained: Train, strategy: list[str]) -> None:
    settings = (*RAMP, "--trainer.max_steps=7", "--model.optimizer.eps=1e-6")
    whole = trained(*settings)

    split = trained(*settings, "--data.batch_size=1", *strategy, n_ranks=2)

    assert column(split, "train/tokens") == column(whole, "train/tokens") == RAMP_TOKENS[:7]
    for name in ("train/loss", "train/grad_norm"):
        assert column(split, name) == pytest.approx(column(whole, name), rel=1e-4), name


EPOCHS = "--trainer.limit_train_batches=12"
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
        pytest.param((), signal_at("SIGKILL", 16), 4, id="within the ramp"),
        pytest.param((EPOCHS, "--model.dropout=0.1"), FOURTH_SAVE, 3, id="at an epoch's end"),
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
    settings = (
        *RAMP,
        *settings,
        f"--trainer.max_steps={RAMP_STEPS}",
        "--checkpoint_every_n_steps=1",
        "--trainer.callbacks+=GradientNoiseScale",
        "--trainer.callbacks.every_n_steps=1",
    )
    whole = trained(*settings)
    arguments = fit_arguments(shards, tmp_path / "cut", *settings)

    checkpoint = stop_and_continue(arguments, tmp_path / "cut", whole, stop, KILLED)

    assert checkpoint["global_step"] == saved_step
    noise = last_checkpoint(whole)["callbacks"]["GradientNoiseScale"]
    assert last_checkpoint(tmp_path / "cut")["callbacks"]["GradientNoiseScale"] == noise
    assert noise["weight"] == pytest.approx(1 - 0.95**6), "steps of one micro-batch do not count"
    for name in (SIGNAL, TRACE, SCALE):
        assert logged(tmp_path / "cut", name) == logged(whole, name)


@pytest.mark.parametrize("budget", [420, 1000, 1400])
def test_a_budget_of_tokens_counts_the_ramp(
    shards: Path, tmp_path: Path, capfd, budget: int
) -> None:
    run_dir = tmp_path / "run"
    options = ("--trainer.max_steps=-1", f"--max_tokens={budget}")

    assert main(fit_arguments(shards, run_dir, *RAMP, *options)) == 0

    n_steps = sum(tokens <= budget for tokens in RAMP_TOKENS)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["max_steps"] == n_steps
    assert column(run_dir, "train/tokens")[-1] == RAMP_TOKENS[n_steps - 1]
    assert f"{budget:,} tokens: {n_steps} steps of 64 to" in capfd.readouterr().out


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
    ([*RAMP, "--trainer.callbacks.schedule={1: 4}"], "does not begin at step 0"),
    ([*RAMP, "--trainer.callbacks.schedule={0: 0, 5: 4}"], "a step needs at least 1 micro-batch"),
    ([*RAMP, "--trainer.callbacks.schedule={0: 8, 5: 4}"], "end with the largest step"),
    ([*RAMP, "--trainer.callbacks.schedule={}"], "does not begin at step 0"),
    (
        [*RAMP, "--trainer.callbacks.schedule=4"],
        "trainer.callbacks.schedule=4 is of the wrong type",
    ),
    ([*RAMP, "--trainer.callbacks.lr_scaling_method=root"], "lr_scaling_method=root"),
    ([*RAMP, "--trainer.max_epochs=2"], "trainer.max_epochs=2 counts passes through the data"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_a_mistake_is_one_sentence(
    shards: Path, tmp_path: Path, refusal, options: Sequence[str], words: str
) -> None:
    assert words in refusal(*fit_arguments(shards, tmp_path / "run", *options))
