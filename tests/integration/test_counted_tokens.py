"""Batches that count different numbers of tokens: ranks and micro-batches train as one process with one batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from anlit import TextFiles
from tests.integration.conftest import VOCABULARY, fit_arguments
from tests.integration.ranks import DDP, FSDP, column, run_ranks
from tests.integration.test_strategies import assert_same_training

STEPS = 8
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def short_and_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of many documents of a few tokens, and some of hundreds."""
    source, path = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("data") / "shards"
    for number in range(400):
        (source / f"short_{number}.txt").write_text(f"{number}")
    for number in range(12):
        (source / f"long_{number}.txt").write_text(" ".join(f"{number} {word}" for word in range(200)))
    data = TextFiles(str(source), pattern="*.txt", vocab_size=VOCABULARY, val_fraction=0.2, path=str(path))
    data.prepare_data()
    return path


@pytest.fixture(scope="module")
def train(short_and_long: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train(ranks, micro-batches, strategy flags, more settings)` → run folder; 16 sequences to a step."""

    def run(n_ranks: int, micro_batches: int, strategy: list[str], *extra: str) -> Path:
        run_dir = tmp_path_factory.mktemp("run")
        arguments = fit_arguments(
            short_and_long, run_dir, f"--data.batch_size={16 // n_ranks // micro_batches}", "--data.val_batch_size=1",
            "--trainer.limit_val_batches=1.0", "--data.score_first_token=false", "--trainer.gradient_clip_val=0.03",
            f"--trainer.accumulate_grad_batches={micro_batches}", f"--trainer.max_steps={STEPS}", "--model.z_loss=0.01",
            "--trainer.val_check_interval=4", "--checkpoint_every_n_steps=1000", *strategy, *extra,
        )  # fmt: skip
        assert run_ranks(arguments, n_ranks) == [0] * n_ranks
        return run_dir

    return run


@pytest.fixture(scope="module")
def reference(train: Train) -> Path:
    """One process, one batch of 16."""
    return train(1, 1, [])


@pytest.mark.parametrize(
    ("n_ranks", "micro_batches", "strategy"),
    [
        pytest.param(1, 8, [], id="accumulated"),
        pytest.param(2, 4, DDP, id="ddp2, accumulated", marks=pytest.mark.slow),
        pytest.param(2, 1, FSDP, id="fsdp2", marks=pytest.mark.slow),
        pytest.param(2, 4, FSDP, id="fsdp2, accumulated"),
        pytest.param(4, 2, [*FSDP, "--trainer.strategy.replicas=2"], id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_ranks_and_micro_batches_are_one_batch(
    reference: Path, train: Train, n_ranks: int, micro_batches: int, strategy: list[str]
) -> None:
    run_dir = train(n_ranks, micro_batches, strategy)
    assert len(column(run_dir, "train/loss")) == STEPS
    assert len(column(run_dir, "val/loss")) == 2
    assert_same_training(run_dir, reference)
