"""What ranks tell each other for limits of time: once a step, and without waiting for devices.

NCCL sends Python objects through the devices. The ranks would wait for all queued kernels.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.cases import slow
from tests.integration.conftest import callback, fit_arguments
from tests.integration.ranks import DDP, FSDP, run_ranks

N_MICRO_BATCHES = 3
STEPS = 4
TIMES = [
    "--trainer.max_time=00:01:00:00",
    "--trainer.val_check_interval=00:01:00:00",
    "--trainer.check_val_every_n_epoch=null",
    "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.train_time_interval=1:00:00",
]
"""Three limits of time, about which rank 0 decides for all."""


@pytest.mark.parametrize("strategy", [DDP, pytest.param(FSDP, marks=slow)], ids=["ddp", "fsdp"])
def test_a_limit_of_time_costs_a_decision_on_the_host_for_each_step(
    shards: Path, tmp_path: Path, strategy: list[str]
) -> None:
    without_times = count_calls(shards, tmp_path / "without", strategy)
    with_times = count_calls(shards, tmp_path / "with", [*strategy, *TIMES])

    for number in range(1, STEPS * N_MICRO_BATCHES):
        ends_step = number % N_MICRO_BATCHES == 0
        decisions = {"host broadcast_object_list": 3, "host broadcast": 6} if ends_step else {}
        assert with_times[number] - without_times[number] == decisions
        assert without_times[number] - with_times[number] == {}
        if strategy == DDP:  # FSDP has Python's all-reduces of norms besides
            signals = {"host all_reduce": 1} if ends_step else {}
            assert without_times[number] == signals


def count_calls(shards: Path, folder: Path, settings: list[str]) -> list[Counter]:
    """The calls of two ranks, which agree, before each micro-batch of a run."""
    folder.mkdir()
    flags = [
        f"--trainer.accumulate_grad_batches={N_MICRO_BATCHES}",
        f"--trainer.max_steps={STEPS}",
        "--trainer.log_every_n_steps=1000",
        *settings,
        *callback("integration.callbacks.CountCollectives", path=folder / "calls"),
    ]
    assert run_ranks(fit_arguments(shards, folder / "run", *flags), 2) == [0, 0]
    lines_by_rank = []
    for rank in range(2):
        lines_by_rank.append((folder / f"calls.{rank}").read_text().splitlines())
    assert lines_by_rank[0] == lines_by_rank[1]
    counts = [Counter(json.loads(line)) for line in lines_by_rank[0]]
    assert len(counts) == STEPS * N_MICRO_BATCHES
    return counts
