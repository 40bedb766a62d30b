"""Runs that start from a trained model, with another attention or on another task."""

from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.cli import main
from tests.integration.cases import slow_cases
from tests.integration.conftest import (
    Train,
    assert_identical,
    fit_arguments,
    last_checkpoint,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import DDP, FSDP, run_ranks
from tests.integration.run_files import config_of, logged, record_of
from tests.nn.models.tiny import random_tokens

SHORT = ("--trainer.max_steps=3", "--model.context_length=150")
HEADS = ("--model.n_heads=4", "--model.n_kv_heads=2", "--model.d_head=12")
FIRST_STEP = ("--trainer.max_steps=1", "--model.optimizer.lr=0")


def logits(path: Path | str) -> torch.Tensor:
    with torch.no_grad():
        return load_checkpoint(str(path), "cpu").model(random_tokens(1, 24))


@pytest.mark.parametrize("model", ["AnGPT", *slow_cases(["GPT", "NGPT"])])
def test_plain_attention_becomes_scale_invariant_over_steps_and_a_resume(
    shards: Path, tmp_path: Path, trained: Train, model: str
) -> None:
    """The model has shared keys and heads of another width, and is exported at the end."""
    plain = trained(*SHORT, *HEADS, model=model)
    warm = (
        *SHORT,
        *HEADS,
        "--model.attention=WarmStart",
        "--model.attention.mechanism=ScaleInvariant",
        "--model.attention.mechanism.tau=4",
        "--model.attention.steps=6",
        "--trainer.max_steps=8",
        f"--initial_weights={plain / 'checkpoints' / 'last.ckpt'}",
    )
    whole = trained(*warm, model=model)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *warm, model=model)

    checkpoint = stop_and_continue(arguments, cut, whole, signal_at("SIGINT", 3), 1)

    share = "model.blocks.1.attention.mechanism.share"
    assert checkpoint["state_dict"][share] == pytest.approx(4 / 6)
    weights = last_checkpoint(whole)["state_dict"]
    assert weights[share] == 1
    assert weights["model.blocks.0.W_q.weight"].shape == (48, 32)
    assert weights["model.blocks.0.W_k.weight"].shape == (24, 32)
    expected = logits(whole)
    exported = tmp_path / "exported"
    assert main(["export", str(whole), f"--output={exported}"]) == 0
    torch.testing.assert_close(logits(exported), expected, rtol=0, atol=1e-5)


def test_fine_tuning_on_needles_starts_from_the_weights(
    tmp_path: Path, trained: Train, refusal
) -> None:
    """configs/experiment/needle.yaml is added. tests/data/test_needle.py resumes its data."""
    plain = trained(*SHORT, model="GPT")
    last = plain / "checkpoints" / "last.ckpt"

    def tuning(run_dir: Path, *extra: str) -> list[str]:
        files = (f"--config={plain}/config.yaml", "--config=experiment/needle.yaml")
        steps = ("--trainer.max_steps=4", "--trainer.val_check_interval=3", "--data.val_samples=4")
        return ["fit", *files, f"--run_dir={run_dir}", *steps, f"--initial_weights={last}", *extra]

    tuned = tmp_path / "tuned"
    still = tmp_path / "still"
    assert main(tuning(tuned)) == 0

    config = config_of(tuned)
    settings = config["model"]["init_args"]
    assert config["data"]["class_path"] == "anlit.NeedleInHaystack"
    assert config["initial_weights"] == str(last)
    assert settings["optimizer"]["init_args"]["lr"] == 2e-5
    assert settings["context_length"] == 150
    assert record_of(tuned)["data"]["task"] == "NeedleInHaystack"
    assert last_checkpoint(tuned)["optimizer_states"][0]["state"][0]["step"] == 4
    assert not logged(tuned, "val/bits_per_byte"), "a loss over answers has no bits per byte"

    assert main(tuning(still, *FIRST_STEP)) == 0
    weights = last_checkpoint(plain)["state_dict"]
    assert_identical(weights, last_checkpoint(still)["state_dict"], "weights")

    # Where the run goes on with ckpt_path last, the weights are not read again.
    lost = ("--ckpt_path=last", "--initial_weights=gone.ckpt", "--trainer.max_steps=5")
    assert main(tuning(tuned, *lost)) == 0
    assert "both name weights" in refusal(*tuning(tmp_path / "run", f"--ckpt_path={last}"))


@pytest.mark.parametrize(
    ("n_ranks", "strategy"),
    [(1, []), *slow_cases([(2, DDP), (2, FSDP)])],
)
def test_a_model_that_is_drawn_late_begins_from_the_weights(
    shards: Path, tmp_path: Path, trained: Train, n_ranks: int, strategy: list[str]
) -> None:
    """configs/trainer/fsdp.yaml has `runtime.meta_init`. New parameters are drawn."""
    tied = ("--model.tie_embeddings=true", *SHORT)
    plain = trained(*tied, model="GPT")
    meta = (*tied, *FIRST_STEP, *strategy, "--model.runtime.meta_init=true")
    initial = f"--initial_weights={plain / 'checkpoints' / 'last.ckpt'}"
    settings = (*meta, initial, "--model.attention=LogN")
    arguments = fit_arguments(shards, tmp_path, *settings, model="GPT")

    assert run_ranks(arguments, n_ranks) == [0] * n_ranks

    weights = dict(last_checkpoint(tmp_path)["state_dict"])
    for name in list(weights):
        if ".mechanism." in name:
            assert weights.pop(name).tolist() == pytest.approx([0.4, 0.4])
    expected = dict(last_checkpoint(plain)["state_dict"])
    assert_identical(expected, weights, "weights")
