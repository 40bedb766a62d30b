"""Runs that start from a trained model, with another attention or on another task."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from anlit import load_checkpoint
from anlit.cli import main
from tests.integration import conftest
from tests.integration.conftest import (
    Train,
    assert_identical,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
)
from tests.integration.ranks import DDP, FSDP, logged, run_ranks
from tests.nn.models.tiny import random_tokens

SHORT = ("--trainer.max_steps=3", "--model.context_length=150")
HEADS = ("--model.n_heads=4", "--model.n_kv_heads=2", "--model.d_head=12")
FIRST_STEP = ("--trainer.max_steps=1", "--model.optimizer.lr=0")


def logits(path: Path | str) -> torch.Tensor:
    with torch.no_grad():
        return load_checkpoint(str(path), "cpu").model(random_tokens(1, 24))


@pytest.mark.parametrize(
    "model", ["AnGPT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT", "NGPT"))]
)
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
    whole, cut = trained(*warm, model=model), tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *warm, model=model)
    checkpoint = conftest.stop_and_continue(arguments, cut, whole, signal_at("SIGINT", 3), 1)
    share = "model.blocks.1.attention.mechanism.share"
    assert checkpoint["state_dict"][share] == pytest.approx(4 / 6)
    assert last_checkpoint(whole)["state_dict"][share] == 1
    shapes = [
        last_checkpoint(whole)["state_dict"][f"model.blocks.0.W_{name}.weight"].shape
        for name in "qk"
    ]
    assert shapes == [(48, 32), (24, 32)]
    for fold in [[], ["--fold"]] if model != "GPT" else [[]]:
        exported = tmp_path / f"exported{''.join(fold)}"
        assert main(["export", str(whole), f"--output={exported}", *fold]) == 0
        torch.testing.assert_close(
            logits(exported), logits(whole), rtol=0, atol=1e-4 if fold else 1e-5
        )


def test_fine_tuning_on_needles_starts_from_the_weights(
    tmp_path: Path, trained: Train, refusal
) -> None:
    """With configs/experiment/needle.yaml. tests/data/test_needle.py resumes its data."""
    plain = trained(*SHORT, model="GPT")
    last = plain / "checkpoints" / "last.ckpt"

    def tuning(run_dir: Path, *extra: str) -> list[str]:
        files = (f"--config={plain}/config.yaml", "--config=experiment/needle.yaml")
        steps = ("--trainer.max_steps=6", "--trainer.val_check_interval=3", "--data.val_samples=4")
        return ["fit", *files, f"--run_dir={run_dir}", *steps, f"--initial_weights={last}", *extra]

    tuned, still = tmp_path / "tuned", tmp_path / "still"
    assert run(tuning(tuned)) == 0
    config = yaml.safe_load((tuned / "config.yaml").read_text())
    assert (config["data"]["class_path"], config["initial_weights"]) == (
        "anlit.NeedleInHaystack",
        str(last),
    )
    settings = config["model"]["init_args"]
    assert (settings["optimizer"]["init_args"]["lr"], settings["context_length"]) == (2e-5, 150)
    assert json.loads((tuned / "run.json").read_text())["data"]["task"] == "NeedleInHaystack"
    assert last_checkpoint(tuned)["optimizer_states"][0]["state"][0]["step"] == 6
    assert not logged(tuned, "val/bits_per_byte"), "a loss over answers has no bits per byte"
    assert run(tuning(still, *FIRST_STEP)) == 0
    assert_identical(
        last_checkpoint(plain)["state_dict"], last_checkpoint(still)["state_dict"], "weights"
    )
    # Where the run goes on with ckpt_path last, the weights are not read again.
    assert (
        run(
            tuning(
                tuned, "--ckpt_path=last", "--initial_weights=gone.ckpt", "--trainer.max_steps=7"
            )
        )
        == 0
    )
    assert "both name weights" in refusal(*tuning(tmp_path / "run", f"--ckpt_path={last}"))


@pytest.mark.parametrize(
    ("n_ranks", "strategy"),
    [(1, []), *(pytest.param(2, strategy, marks=pytest.mark.slow) for strategy in (DDP, FSDP))],
)
def test_a_model_that_is_drawn_late_begins_from_the_weights(
    shards: Path, tmp_path: Path, trained: Train, n_ranks: int, strategy: list[str]
) -> None:
    """With `runtime.meta_init`, as in configs/trainer/fsdp.yaml. New parameters are drawn."""
    tied = ("--model.tie_embeddings=true", *SHORT)
    plain, meta = (
        trained(*tied, model="GPT"),
        (*tied, *FIRST_STEP, *strategy, "--model.runtime.meta_init=true"),
    )
    settings = (
        f"--initial_weights={plain / 'checkpoints' / 'last.ckpt'}",
        "--model.attention=LogN",
    )
    assert (
        run_ranks(fit_arguments(shards, tmp_path, *meta, *settings, model="GPT"), n_ranks)
        == [0] * n_ranks
    )
    weights = dict(last_checkpoint(tmp_path)["state_dict"])
    strength = [weights.pop(name) for name in list(weights) if ".mechanism." in name]
    assert torch.cat(strength).unique().tolist() == pytest.approx([0.4])
    assert_identical(dict(last_checkpoint(plain)["state_dict"]), weights, "weights")
