"""Runs that start from a trained model, with another attention or on another task."""

import json
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


def counted_seeds(runs: list[Path], output: Path) -> list[int]:
    """The numbers of seeds in the rows of `anlit compare`, sorted."""
    assert main(["compare", *map(str, runs), f"--output={output}"]) == 0
    comparison = json.loads((output / "convergence.json").read_text())
    return sorted(len(group["seeds"]) for group in comparison["groups"])


def test_runs_from_the_weights_of_other_configurations_are_another_arm(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    """Runs from weights that differ in seeds are one arm; also after an anneal of each run."""
    short = ("--trainer.max_steps=2", "--trainer.val_check_interval=2")
    bases = {
        "slow-1": trained(*short, model="GPT"),
        "slow-2": trained(*short, "--seed_everything=2", model="GPT"),
        "fast-1": trained(*short, "--model.optimizer.lr=0.03", model="GPT"),
    }
    tuned = []
    annealed = []
    for name, base in bases.items():
        tuned.append(tmp_path / f"tuned-{name}")
        annealed.append(tmp_path / f"annealed-{name}")
        seed = f"--seed_everything={name[-1]}"
        begun = (*short, seed, f"--initial_weights={base}", "--model.optimizer.lr=0.002")
        assert main(fit_arguments(shards, tuned[-1], *begun, model="GPT")) == 0
        branch = ("--anneal=0.5", f"--ckpt_path={tuned[-1]}", f"--run_dir={annealed[-1]}")
        assert main(["fit", f"--config={tuned[-1]}/config.yaml", *branch]) == 0

    assert counted_seeds(tuned, tmp_path / "a") == [1, 2]
    assert counted_seeds(annealed, tmp_path / "b") == [1, 2]


def test_weights_with_another_tokenizer_are_refused(
    shards: Path, tmp_path: Path, trained: Train, refusal
) -> None:
    """A vocabulary of the same size has other tokens. A run from them would only look trained."""
    base = trained(*SHORT, model="GPT")
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"{number} zebras ran into the fog. " * 40)
    other = tmp_path / "other"
    prepare = ("--vocab_size=320", f"--output={other}", f"--source={source}")
    assert main(["prepare", "TextFiles", *prepare]) == 0
    begun = (*SHORT, f"--initial_weights={base}")
    arguments = fit_arguments(other, tmp_path / "tuned", *begun, model="GPT")

    error = refusal(*arguments)

    assert "initial_weights was trained with another tokenizer" in error
    assert "--tokenizer RUN/tokenizer.json" in error
    assert main([*arguments, "--accept_changes=true"]) == 0
    wider = ("--model.vocab_size=384", f"--run_dir={tmp_path / 'wider'}")
    assert "has a vocabulary of 320 tokens and the model 384" in refusal(*arguments, *wider)
