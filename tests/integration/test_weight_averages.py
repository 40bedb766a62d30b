"""Runs that average their weights are evaluated and continued, on one and two processes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import anlit
from anlit.cli import main
from tests.integration.cases import slow, slow_cases, slow_except
from tests.integration.conftest import (
    Train,
    assert_identical,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import BACKGROUND, DDP, FSDP, run_ranks
from tests.integration.run_files import column, config_of, logged, record_of

BASE = ("--trainer.max_steps=14", "--trainer.val_check_interval=5", "--checkpoint_every_n_steps=4")
EMA = ("--config=trainer/ema.yaml", "--trainer.callbacks.decay=0.8")
TAIL = ("--config=trainer/swa.yaml", "--trainer.callbacks.share=0.7")
"""The mean of steps 4 to 13: the checkpoint of step 8 has a part of it."""
RATE = ("--model.optimizer.lr=0.02",)
"""So large that a mean of nGPT's rows is clearly shorter than 1."""
SPLIT = ("--data.batch_size=2",)
ENTRIES = ("current_model_state", "averaging_state")


@pytest.fixture(scope="module")
def averaged(trained: Train) -> Path:
    """An nGPT with a moving average. Tests change copies of it."""
    return trained(*BASE, *EMA, *RATE, model="NGPT")


def norms(weights: dict[str, Any]) -> torch.Tensor:
    """The norms of the vectors of nGPT's matrices that are rows."""
    rows = []
    for name in weights:
        if name.endswith(("W_q.weight", "embedding.weight")):
            rows.append(weights[name].float().norm(dim=1))
    return torch.cat(rows)


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference of two sets of weights."""
    assert first.keys() == second.keys()
    largest = 0.0
    for name in first:
        difference = (first[name] - second[name]).abs().max()
        largest = max(largest, difference.item())
    return largest


def test_the_run_says_that_it_averages(averaged: Path) -> None:
    (callback,) = config_of(averaged)["trainer"]["callbacks"]

    assert record_of(averaged)["averaged_by"] == "EMAWeightAveraging"
    assert callback["class_path"].endswith("EMAWeightAveraging")
    assert callback["init_args"]["decay"] == 0.8
    assert logged(averaged, "val/averaged_steps") == [(4, "5.0"), (9, "10.0"), (13, "14.0")]


def test_every_reader_gets_the_averages(averaged: Path, tmp_path: Path, capfd) -> None:
    """Reading a run, validate, export and generate, by the command line and in Python."""
    checkpoint = last_checkpoint(averaged)
    averages = checkpoint["state_dict"]
    assert distance(averages, checkpoint["current_model_state"]) > 1e-3
    assert (norms(averages) - 1).abs().max() < 1e-6
    last = str(averaged / "checkpoints" / "last.ckpt")

    loaded = anlit.load_checkpoint(last, "cpu").model.state_dict()
    assert distance(loaded, averages) == 0

    assert main(["export", last, "--output", str(tmp_path / "exported")]) == 0
    exported = anlit.load_checkpoint(str(tmp_path / "exported"), "cpu").model.state_dict()
    assert distance(exported, averages) == 0

    capfd.readouterr()
    config = f"--config={averaged / 'config.yaml'}"
    assert main(["validate", config, "--ckpt_path=last"]) == 0
    (loss,) = re.findall(r"val/loss +([0-9.]+)", capfd.readouterr().out)
    assert float(loss) == pytest.approx(column(averaged, "val/loss")[-1], rel=1e-5)

    assert main(["generate", last, "a", "--max_tokens=2"]) == 0


def test_another_run_begins_from_the_averages(shards: Path, averaged: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    last = averaged / "checkpoints" / "last.ckpt"
    first = ("--trainer.max_steps=1", "--model.optimizer.lr=0", f"--initial_weights={last}")

    assert main(fit_arguments(shards, run_dir, *first, model="NGPT")) == 0

    checkpoint = last_checkpoint(run_dir)
    assert "averaging_state" not in checkpoint
    assert distance(checkpoint["state_dict"], last_checkpoint(averaged)["state_dict"]) < 1e-6


def test_an_annealed_run_goes_on_with_weights_and_averages(averaged: Path, tmp_path: Path) -> None:
    branch = tmp_path / "branch"
    arguments = ["fit", f"--config={averaged / 'config.yaml'}", f"--ckpt_path={averaged}"]

    assert main([*arguments, "--anneal=0.3", f"--run_dir={branch}"]) == 0

    averages_before = last_checkpoint(averaged)["state_dict"]
    checkpoint = last_checkpoint(branch)
    assert checkpoint["global_step"] == 18
    assert checkpoint["averaging_state"]["n_averaged"] == 18
    change_of_averages = distance(checkpoint["state_dict"], averages_before)
    distance_of_weights = distance(checkpoint["current_model_state"], averages_before)
    assert 0 < change_of_averages < distance_of_weights


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ("NGPT", EMA),
        ("AnGPT", TAIL),
        *slow_cases([("AnGPT", EMA), ("NGPT", TAIL)]),
    ],
)
def test_a_killed_run_is_continued_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, model: str, rule: tuple[str, ...]
) -> None:
    settings = (*BASE, *rule, *RATE)
    whole = trained(*settings, model=model)
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *settings, model=model)

    checkpoint_of_stop = stop_and_continue(arguments, cut, whole, signal_at("SIGKILL", 9))

    assert checkpoint_of_stop["global_step"] == 8
    checkpoint_of_whole = last_checkpoint(whole)
    checkpoint_of_cut = last_checkpoint(cut)
    for key in ENTRIES:
        assert_identical(checkpoint_of_whole[key], checkpoint_of_cut[key], key)


WAYS = {
    "ddp": DDP,
    "sharded": (*FSDP, "--trainer.strategy.reshard_after_forward=false"),
    "sharded, in the background": BACKGROUND,
}


@pytest.mark.parametrize("way", slow_except(["sharded"], WAYS))
def test_ranks_average_as_one_process_does_and_continue_to_the_bit(
    shards: Path, tmp_path: Path, trained: Train, way: str
) -> None:
    """FSDP2 has gathered averages after a validation. No step may be taken with them."""
    settings = (*BASE, *EMA, *RATE)
    one_process = trained(*settings, model="NGPT")
    split = (*settings, *SPLIT, *WAYS[way])
    whole = trained(*split, model="NGPT", n_ranks=2)

    for curve in ("train/loss", "val/loss"):
        assert column(whole, curve) == pytest.approx(column(one_process, curve), rel=1e-4)
    checkpoint_of_one = last_checkpoint(one_process)
    checkpoint = last_checkpoint(whole)
    for key in ("state_dict", "current_model_state"):
        assert distance(checkpoint_of_one[key], checkpoint[key]) < 1e-4

    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *split, model="NGPT")
    stop_and_continue(arguments, cut, whole, signal_at("SIGTERM", 6, 1), 75, n_ranks=2)
    checkpoint_of_cut = last_checkpoint(cut)
    for key in ENTRIES:
        assert_identical(checkpoint[key], checkpoint_of_cut[key], key)


@slow
@pytest.mark.parametrize("model", ["NGPT", "GPT"])
def test_a_checkpoint_moves_between_one_process_and_shards(
    shards: Path, tmp_path: Path, trained: Train, model: str
) -> None:
    tied = ("--model.tie_embeddings=true",) if model == "GPT" else ()
    settings = (*BASE, *EMA, *RATE, *tied)
    constant = ("--model.schedule.final=1", "--model.schedule.warmup=0")
    shorter = (*settings, *constant, "--trainer.max_steps=7")
    longer = (*settings, *constant)
    expected = last_checkpoint(trained(*longer, model=model))
    sharded = (*SPLIT, *FSDP)

    to_shards = tmp_path / "to-shards"
    shutil.copytree(trained(*shorter, model=model), to_shards)
    arguments = fit_arguments(shards, to_shards, *longer, *sharded, "--ckpt_path=last", model=model)
    assert run_ranks(arguments, 2) == [0, 0]

    to_one = tmp_path / "to-one"
    run_with_shards = trained(*shorter, *sharded, model=model, n_ranks=2)
    shutil.copytree(run_with_shards, to_one, symlinks=True)
    assert run(fit_arguments(shards, to_one, *longer, "--ckpt_path=last", model=model)) == 0

    for moved in (to_shards, to_one):
        checkpoint = last_checkpoint(moved)
        assert checkpoint["averaging_state"]["n_averaged"] == 14
        for key in ("state_dict", "current_model_state"):
            assert distance(checkpoint[key], expected[key]) < 1e-4


@slow
@pytest.mark.parametrize(
    ("rule", "precision"), [(EMA, "32-true"), (EMA, "bf16-true"), ((), "32-true")]
)
def test_shards_are_validated_with_the_averages(
    trained: Train, tmp_path: Path, rule: tuple[str, ...], precision: str
) -> None:
    """Without averages they are validated with the weights."""
    settings = (*BASE, *rule, *SPLIT, *FSDP, f"--trainer.precision={precision}")
    whole = trained(*settings, model="AnGPT", n_ranks=2)
    arguments = [
        "validate",
        f"--config={whole / 'config.yaml'}",
        "--ckpt_path=last",
        "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={tmp_path}",
    ]

    assert run_ranks(arguments, 2) == [0, 0]

    (file,) = tmp_path.rglob("metrics.csv")
    (loss,) = column(file.parent, "val/loss")
    assert loss == pytest.approx(column(whole, "val/loss")[-1])
