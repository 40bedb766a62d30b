"""`fit --max_tokens` and `--tokens_per_parameter`: the length of a run in tokens."""

from pathlib import Path

import pytest
from jsonargparse import Namespace

from anlit.cli import main
from anlit.commands.budget import set_steps
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from tests.integration.conftest import fit_arguments, last_checkpoint
from tests.integration.run_files import config_of, record_of

STEP_TOKENS = 4 * 32
"""Batch × context of a tiny run."""
NO_STEPS = "--trainer.max_steps=-1"
N_PARAMETERS = 20_000


def read_steps(shards: Path, *options: str) -> int:
    """Return the steps that `fit` would take of a model with `N_PARAMETERS`."""
    arguments = fit_arguments(shards, Path("unused"), *options)
    config: Namespace = read_command(ConfigurationParser, arguments).config["fit"]
    set_steps(config, lambda: N_PARAMETERS)
    assert config.max_tokens is config.tokens_per_parameter is None
    return int(config.trainer.max_steps)


@pytest.mark.parametrize("budget", ["1000", "1e3", "1k"])
def test_a_budget_of_tokens_is_the_steps_that_it_allows(shards: Path, capsys, budget: str) -> None:
    assert read_steps(shards, NO_STEPS, f"--max_tokens={budget}") == 1000 // STEP_TOKENS == 7

    assert "1,000 tokens: 7 steps of 128 tokens" in capsys.readouterr().out


def test_the_default_number_of_steps_gives_way_to_a_budget(shards: Path) -> None:
    default = f"--trainer.max_steps={TRAINER_DEFAULTS['max_steps']}"

    assert read_steps(shards, default, "--max_tokens=1000") == 7


def test_accumulation_counts(shards: Path) -> None:
    accumulated = "--trainer.accumulate_grad_batches=3"

    n_steps = read_steps(shards, NO_STEPS, "--max_tokens=1000", accumulated)

    assert n_steps == 1000 // (3 * STEP_TOKENS) == 2


def test_a_budget_per_parameter_counts_the_parameters_of_the_model(
    shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    assert read_steps(shards, NO_STEPS, "--tokens_per_parameter=0.05") == 1000 // STEP_TOKENS

    assert main(fit_arguments(shards, run, NO_STEPS, "--tokens_per_parameter=0.05")) == 0
    n_parameters = record_of(run)["parameters"]
    n_steps = config_of(run)["trainer"]["max_steps"]
    assert n_steps == last_checkpoint(run)["global_step"]
    assert n_steps == int(0.05 * n_parameters / STEP_TOKENS) > 1


def test_a_run_with_a_budget_is_continued_with_its_steps(shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(fit_arguments(shards, run, NO_STEPS, "--max_tokens=300")) == 0
    assert last_checkpoint(run)["global_step"] == 300 // STEP_TOKENS == 2
    assert config_of(run)["max_tokens"] is None

    longer = ["--trainer.max_steps=4", "--ckpt_path=last"]
    assert main(["fit", "--config", str(run / "config.yaml"), *longer]) == 0

    assert config_of(run)["trainer"]["max_steps"] == last_checkpoint(run)["global_step"] == 4


@pytest.mark.parametrize(("options", "words"), [
    (["--max_tokens=1000"],
     "max_tokens=1000 and trainer.max_steps=40 both give the length of the run: leave one out, or "
     "give --trainer.max_steps -1 if it is in a file"),
    ([NO_STEPS, "--max_tokens=1000", "--tokens_per_parameter=20"],
     "max_tokens=1000 and tokens_per_parameter=20 both give the length"),
    ([NO_STEPS, "--max_tokens=100"], "100 tokens are less than a step of 128: give more tokens"),
    ([NO_STEPS, "--max_tokens=-5"], "max_tokens=-5.0 is out of range: give more than 0"),
    ([NO_STEPS, "--max_tokens=many"], "max_tokens=many is of the wrong type: give a number"),
    ([NO_STEPS, "--max_tokens=2m"], "give a number; a count may end in k, K, M, B, T"),
    (["--trainer.max_steps=10G"], "give an integer; a count may end in k, K, M, B, T"),
])  # fmt: skip
def test_a_wrong_budget_is_one_sentence(shards, tmp_path, refusal, options, words: str) -> None:
    assert words in refusal(*fit_arguments(shards, tmp_path / "run", *options))
