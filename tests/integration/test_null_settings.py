"""null, and None in Python, is taken by a setting's type or refused in a sentence."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import anlit
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.errors import UserError
from anlit.training.optim.schedule import Cosine
from tests.integration.cases import slow_cases
from tests.integration.conftest import SHAPE, value_at

TAKE_NULL = {
    "run_dir",
    "trainer.enable_progress_bar",
    "trainer.gradient_clip_val",
    "model.init_args.vocab_size",
    "model.init_args.optimizer.init_args.lr",
    "model.init_args.alpha_init",
    "model.init_args.s_z_init",
    "model.init_args.runtime.float8",
}
"""Settings whose null means something: no clipping, a rate by size, no float8."""


def leaves(section: dict[str, Any], key: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{key}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{key}{name}.")


def with_null(config: dict[str, Any], key: str) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = changed
    *parents, last = key.split(".")
    for name in parents:
        section = section[name]
    section[last] = None
    return changed


NULLS = [
    ("NGPT", "NeedleInHaystack", ["--config=optimizer/muon.yaml"], 1),
    ("AnGPT", "PythonSources", ["--model.attention=ScaleInvariant"], 1),
    ("GPT", "TextFiles", ["--data.source=texts", "--config=runtime/float8.yaml"], 1),
    ("GPT", "TokenShards", [], 1),
]


@pytest.mark.parametrize(
    ("model", "data", "more", "key_step"), [("GPT", "TokenShards", [], 3), *slow_cases(NULLS)]
)
def test_null_in_any_key_is_taken_by_its_type_or_refused(
    model: str, data: str, more: list[str], key_step: int, working_folder: Path, printed_config
) -> None:
    """The fast test takes each third key."""
    chosen = ["--config=tiny.yaml", f"--model={model}", f"--data={data}", *more]
    config = printed_config(*chosen)
    keys = [key for key in leaves(config) if value_at(config, key) is not None]
    taken = []
    errors = {}
    for key in keys[::key_step]:
        Path("null.yaml").write_text(yaml.safe_dump(with_null(config, key)))
        try:
            read_command(ConfigurationParser, ["fit", "--config=null.yaml"])
            taken.append(key)
        except UserError as error:
            errors[key] = str(error)
    assert set(taken) <= TAKE_NULL
    for key, error in errors.items():
        assert not re.search(r"\n|Namespace|Union|unforeseen", error)
        assert key.replace(".init_args", "") in error.replace(".init_args", "")
        assert " is empty: give " in error or " needs --" in error


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--data.shuffle=null", "data.shuffle is empty: give true or false; the default is true"),
        ("--data.batch_size=null", "data.batch_size is empty: give an integer; the default is 8"),
        ("--model.qk_norm=null", "model.qk_norm is empty: give true or false; the default is true"),
        ("--model.attention=null", "model.attention is empty: give ALiBi, "),
        (
            "--model.optimizer.eps=null",
            "model.optimizer.eps is empty: give a number; the default is 1e-09",
        ),
        (
            "--model.schedule=null",
            "model.schedule is empty: give Constant, Cosine, Linear or WSD; the default is Cosine",
        ),
        (
            "--model.schedule.warmup=null",
            "model.schedule.warmup is empty: give a number; the default is 0.0",
        ),
        ("--model.optimizer=null", "model.optimizer is empty: give anlit.AdamW, "),
        ("--seed_everything=null", "seed_everything has an empty value: give "),
        (
            "--model.optimizer.betas=[null,0.9]",
            "model.optimizer.betas has an empty value: give a number",
        ),
        ("--trainer.callbacks=[null]", "trainer.callbacks has an empty value: give "),
    ],
)
def test_a_null_option_is_one_sentence_with_the_default(
    option: str, says: str, working_folder: Path, refusal
) -> None:
    assert says in refusal("fit", "--config=tiny.yaml", option)
    assert not Path("new").exists()


@pytest.mark.parametrize("options", [["--model=AnGPT", "--data=FineWeb"], ["--config=tiny.yaml"]])
def test_a_null_option_is_taken_where_null_means_something(
    options: list[str], working_folder: Path, printed_config
) -> None:
    config = printed_config(*options, "--model.optimizer.lr=null")

    assert value_at(config, "model.init_args.optimizer.init_args.lr") is None


def test_an_option_below_a_null_optimizer_is_for_the_default_optimizer(
    working_folder: Path, printed_config
) -> None:
    Path("null.yaml").write_text("model: {init_args: {optimizer: null}}")

    config = printed_config("--config=tiny.yaml", "--config=null.yaml", "--model.optimizer.lr=2e-3")

    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "anlit.AdamW"
    assert optimizer["init_args"]["lr"] == 2e-3


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: anlit.GPT(**SHAPE, qk_norm=None),
            "model.qk_norm is empty: give true or false; the default is true",
        ),
        (lambda: anlit.GPT(**SHAPE, runtime=None), "model.runtime is empty"),
        (lambda: anlit.GPT(**SHAPE, schedule=None), "model.schedule is empty"),
        (lambda: Cosine(warmup=None), "model.schedule.warmup is empty"),
        (lambda: anlit.TokenShards("data", shuffle=None), "data.shuffle is empty"),
        (lambda: anlit.AdamW([], eps=None), "model.optimizer.eps is empty"),
    ],
)
def test_none_in_python_is_refused_too(build: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build()
