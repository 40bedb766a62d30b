"""Which kernels compute attention is in run.json, and the same in every start."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cases import slow_cases
from tests.integration.conftest import Train, fit_arguments, run
from tests.integration.ranks import DDP, FSDP
from tests.integration.run_files import record_of, values

SHORT = ("--trainer.max_steps=6", "--model.attention=ScaleInvariant")


def kernels(run_dir: Path) -> list[dict[str, Any]]:
    return record_of(run_dir)["attention"]


@pytest.mark.parametrize(
    ("n_ranks", "strategy"),
    [(1, []), *slow_cases([(2, DDP), (2, FSDP)])],
    ids=["one", "ddp", "fsdp"],
)
def test_a_run_tells_the_kernel_of_each_kind_of_attention(
    trained: Train, n_ranks: int, strategy: list[str]
) -> None:
    settings = (*SHORT, "--model.attention.learned=globally", *strategy)

    (record,) = kernels(trained(*settings, n_ranks=n_ranks))

    assert record["kernel"] == "blockwise"
    assert record["mechanism"] == "ScaleInvariant(decay globally)"
    assert record["packed"]


def test_a_continued_run_computes_with_the_same_kernels(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    settings = (*SHORT, "--model.attention.learned=globally")
    first = trained(*settings)
    run_dir = shutil.copytree(first, tmp_path / "run")
    more = ("--trainer.max_steps=8", "--ckpt_path=last")

    assert run(fit_arguments(shards, run_dir, *settings, *more)) == 0

    assert kernels(run_dir) == kernels(first)


def test_a_longer_context_adds_its_kernels_also_to_a_continued_run(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    settings = ("--trainer.max_steps=4", "--data.context_schedule={0: 16, 2: 32}")
    first = trained(*settings)
    run_dir = shutil.copytree(first, tmp_path / "run")
    more = ("--trainer.max_steps=5", "--ckpt_path=last")

    assert run(fit_arguments(shards, run_dir, *settings, *more)) == 0

    assert values(kernels(first), "length")[:2] == [16, 32]
    assert kernels(run_dir) == kernels(first)
