"""`fit --max_tokens` and `--tokens_per_parameter`: the length of a run in tokens."""

from pathlib import Path

import pytest
import yaml

from anlit.cli import main
from anlit.commands.trainer_defaults import TRAINER_DEFAULTS
from tests.integration.conftest import fit_arguments

STEP_TOKENS = 4 * 32
"""Batch × context of a tiny run."""
NO_STEPS = "--trainer.max_steps=-1"


def config_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.parametrize("budget", ["1000", "1e3", "1k"])
def test_a_budget_of_tokens_is_the_steps_that_it_allows(shards, tmp_path, capfd, budget) -> None:
    run = tmp_path / "run"

    assert main(fit_arguments(shards, run, NO_STEPS, f"--max_tokens={budget}")) == 0

    config = config_of(run)
    assert config["trainer"]["max_steps"] == 1000 // STEP_TOKENS == 7
    assert config["max_tokens"] is None
    assert "1,000 tokens: 7 steps of 128 tokens" in capfd.readouterr().out


def test_the_default_number_of_steps_gives_way_to_a_budget(shards, tmp_path) -> None:
    run = tmp_path / "run"
    default = f"--trainer.max_steps={TRAINER_DEFAULTS['max_steps']}"

    assert main(fit_arguments(shards, run, default, "--max_tokens=1000")) == 0

    assert config_of(run)["trainer"]["max_steps"] == 7


def test_accumulation_counts(shards, tmp_path) -> None:
    options = [NO_STEPS, "--max_tokens=1000", "--trainer.accumulate_grad_batches=3"]

    assert main(fit_arguments(shards, tmp_path / "run", *options)) == 0

    assert config_of(tmp_path / "run")["trainer"]["max_steps"] == 1000 // (3 * STEP_TOKENS) == 2


def test_a_budget_per_parameter_counts_the_parameters_of_the_model(shards, tmp_path) -> None:
    run = tmp_path / "run"

    assert main(fit_arguments(shards, run, NO_STEPS, "--tokens_per_parameter=0.05")) == 0

    parameters = yaml.safe_load((run / "run.json").read_text())["parameters"]
    assert config_of(run)["trainer"]["max_steps"] == int(0.05 * parameters / STEP_TOKENS) > 1


def test_a_run_with_a_budget_is_continued_with_its_steps(shards, tmp_path, capfd) -> None:
    run = tmp_path / "run"
    main(fit_arguments(shards, run, NO_STEPS, "--max_tokens=1000"))

    longer = ["--trainer.max_steps=9", "--ckpt_path=last"]
    assert main(["fit", "--config", str(run / "config.yaml"), *longer]) == 0

    assert config_of(run)["trainer"]["max_steps"] == 9


@pytest.mark.parametrize(("options", "words"), [
    (["--max_tokens=1000"],
     "max_tokens=1000 and trainer.max_steps=40 both give the length of the run: leave one out, or "
     "give --trainer.max_steps -1 if it is in a file"),
    ([NO_STEPS, "--max_tokens=1000", "--tokens_per_parameter=20"],
     "max_tokens=1000 and tokens_per_parameter=20 both give the length"),
    ([NO_STEPS, "--max_tokens=100"], "100 tokens are less than a step of 128: give more tokens"),
    ([NO_STEPS, "--max_tokens=-5"], "max_tokens=-5.0 is out of range: give more than 0"),
    ([NO_STEPS, "--max_tokens=many"], "max_tokens=many is of the wrong type: give a number"),
])  # fmt: skip
def test_a_wrong_budget_is_one_sentence(shards, tmp_path, refusal, options, words: str) -> None:
    assert words in refusal(*fit_arguments(shards, tmp_path / "run", *options))
