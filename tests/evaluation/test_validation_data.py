"""The data that a checkpoint is evaluated on."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit import GPT, TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import load_validation_data
from anlit.training.load_model import load_checkpoint
from tests.evaluation.saved import make_run


def test_a_run_on_needles_is_measured_on_its_text(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", data, GPT)
    config = yaml.safe_load((run / "config.yaml").read_text())
    arguments = {"path": str(data), "lengths": [16]}
    config["data"] = {"class_path": "anlit.NeedleInHaystack", "init_args": arguments}
    (run / "config.yaml").write_text(yaml.safe_dump(config))

    loaded = load_validation_data(load_checkpoint(str(run), "cpu"))

    assert type(loaded) is TokenShards


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "s3://theirs/data"}, "names the address "),
        ({}, "is not complete "),
    ],
)
def test_a_run_can_name_neither_an_address_nor_data_without_a_path(
    run: Path, settings: dict[str, Any], message: str
) -> None:
    """The run may come from someone else, and must not use this user's credentials."""
    checkpoint = load_checkpoint(str(run), "cpu")
    assert checkpoint.config is not None
    checkpoint.config["data"]["init_args"] = settings

    with pytest.raises(UserError, match=f"{message}.*: set --data"):
        load_validation_data(checkpoint)
