"""Two heads on three ranks: one rank holds no row of a gate, and nothing may depend on that."""

from pathlib import Path

import pytest

from tests.integration.conftest import fit_arguments
from tests.integration.ranks import FSDP, column, run_ranks
from tests.integration.test_strategies import assert_same_training

GATED = ("--model.attention_gate=per_head", "--trainer.gradient_clip_val=0.03", "--model.qk_norm=false",
         "--model.qk_clip=0.002")  # fmt: skip
SGD = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=5", "--model.optimizer.fused=false")
"""AdamW would show the rounding in a tiny gradient whole."""
COUNTED = ("--data.score_first_token=false",)


def trained(shards: Path, run_dir: Path, model: str, n_ranks: int, *extra: str) -> Path:
    settings = tuple(one for one in GATED if model != "NGPT" or "qk_norm" not in one)
    arguments = fit_arguments(
        shards, run_dir, f"--data.batch_size={6 // n_ranks}", "--trainer.max_steps=6", "--trainer.val_check_interval=3",
        "--checkpoint_every_n_steps=100", "--data.val_batch_size=2", *settings, *SGD, *extra, model=model,
    )  # fmt: skip
    assert run_ranks(arguments, n_ranks) == [0] * n_ranks
    return run_dir


@pytest.mark.parametrize(
    ("model", "extra"),
    [("AnGPT", COUNTED), *(pytest.param(model, (), marks=pytest.mark.slow) for model in ("NGPT", "GPT"))],
)
def test_more_ranks_than_heads(shards: Path, tmp_path: Path, model: str, extra: tuple[str, ...]) -> None:
    """Norms are restored and logged, gradients and QK clipped, checkpoints written as on one rank."""
    alone = trained(shards, tmp_path / "alone", model, 1, *extra, "--trainer.limit_val_batches=3")
    sharded = trained(shards, tmp_path / "sharded", model, 3, *extra, *FSDP, "--trainer.limit_val_batches=1")
    assert len(column(sharded, "train/loss")) == 6
    assert_same_training(sharded, alone)
    if model != "GPT":
        for name in ("norms/row_max", "norms/row_min"):
            assert column(sharded, name) == pytest.approx(column(alone, name), rel=1e-6, abs=1e-9)
        for name in ("scaling/alpha_A", "scaling/alpha_M"):
            assert column(sharded, name) == pytest.approx(column(alone, name), rel=1e-6)
