"""Which kernels compute attention is in run.json, and the same in every start."""

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Train, fit_arguments, run
from tests.integration.ranks import DDP, FSDP

SHORT = ("--trainer.max_steps=6", "--model.attention=ScaleInvariant")


def kernels(run_dir: Path) -> list[dict]:
    return json.loads((run_dir / "run.json").read_text())["attention"]


@pytest.mark.parametrize(
    "strategy",
    [[], *(pytest.param(s, marks=pytest.mark.slow) for s in (DDP, FSDP))],
    ids=["one", "ddp", "fsdp"],
)
def test_a_run_tells_the_kernel_of_each_kind_of_attention(
    trained: Train, strategy: list[str]
) -> None:
    run_dir = trained(
        *SHORT, "--model.attention.learned=globally", *strategy, n_ranks=2 if strategy else 1
    )
    (record,) = kernels(run_dir)
    assert record["kernel"] == "blockwise"
    assert record["mechanism"] == "ScaleInvariant(decay globally)"
    assert record["packed"]


def test_a_continued_run_computes_with_the_same_kernels(shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run(fit_arguments(shards, run_dir, *SHORT)) == 0
    first_kernels = kernels(run_dir)
    more = ("--trainer.max_steps=8", "--ckpt_path=last")
    assert run(fit_arguments(shards, run_dir, *SHORT, *more)) == 0
    assert kernels(run_dir) == first_kernels


def test_a_longer_context_adds_its_kernels(trained: Train) -> None:
    run_dir = trained("--trainer.max_steps=4", "--data.context_schedule={0: 16, 2: 32}")
    assert [record["length"] for record in kernels(run_dir)][:2] == [16, 32]
