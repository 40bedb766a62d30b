"""What an error suggests to users who know the names of other tools."""

from pathlib import Path

import pytest

from anlit.commands.configuration_checks import walk_settings
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.config.foreign_names import KEYS

FIT = ["fit", "--model=GPT", "--data=TokenShards", "--data.path=nowhere"]


def test_every_suggested_key_is_a_setting_of_fit() -> None:
    config = read_command(ConfigurationParser, FIT).config["fit"]

    keys = {setting.key for setting in walk_settings(config.as_dict())}

    assert set(KEYS.values()) <= keys


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [
        ("--trainer.epochs=3", "did you mean --trainer.max_epochs?"),
        ("--trainer.lr=1", "did you mean --model.optimizer.lr?"),
        ("--trainer.log_every_steps=3", "did you mean --trainer.log_every_n_steps?"),
        ("--trainer.foo=3", "anlit fit --help lists the options"),
        ("--traner.max_steps=3", "did you mean --trainer.max_steps?"),
        ("--seed=3", "did you mean --seed_everything?"),
        ("--optimizer.betas=[0,0]", "did you mean --model.optimizer.betas?"),
        ("--output_dir=x", "did you mean --run_dir?"),
        ("--model.num_attention_heads=3", "did you mean model.n_heads?"),
        ("--model.optimizer.learning_rate=3", "did you mean model.optimizer.lr?"),
        ("--data.block_size=3", "did you mean model.context_length?"),
    ],
)
def test_an_unknown_setting_gets_the_key_that_was_meant(
    tmp_path: Path, refusal, option: str, suggestion: str
) -> None:
    assert refusal(*FIT, f"--run_dir={tmp_path / 'run'}", option).endswith(f": {suggestion}")
