"""A setting has the value that the user wrote, or a sentence refuses it."""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping

import anlit
from anlit.cli import main
from anlit.io.read import read_yaml
from anlit.io.yaml_text import dump_yaml, parse_scalar, parse_yaml
from tests.integration.conftest import value_at

NESTED = "class_path: anlit.ScaleInvariant\ninit_args:\n  tau: 3\n  tau: 4\n"


@pytest.mark.parametrize(
    ("files", "typed", "says"),
    [
        (
            {"two.yaml": "trainer:\n  max_steps: 1\nrun_dir: new\ntrainer:\n  max_epochs: 1\n"},
            "fit --config tiny.yaml --config two.yaml",
            "two.yaml cannot be read (trainer is written twice, in lines 1 and 4)",
        ),
        (
            {"nested.yaml": NESTED},
            "fit --config tiny.yaml --model.attention nested.yaml",
            "nested.yaml cannot be read (init_args.tau is written twice, in lines 3 and 4)",
        ),
        (
            {
                "nested.yaml": NESTED,
                "own.yaml": "model:\n  init_args:\n    attention: nested.yaml\n",
            },
            "fit --config tiny.yaml --config own.yaml",
            "nested.yaml cannot be read (init_args.tau is written twice, in lines 3 and 4)",
        ),
        (
            {},
            "fit --config tiny.yaml '--model.schedule={warmup: 0.1, warmup: 0.2}'",
            "warmup is written twice",
        ),
        (
            {
                "study.yaml": (
                    "seeds: [1]\narms:\n  a: {configs: [tiny.yaml]}\n  a: {configs: [tiny.yaml]}\n"
                )
            },
            "study --config study.yaml --dry_run",
            "study.yaml cannot be read (arms.a is written twice, in lines 3 and 4)",
        ),
        (
            {"two.yaml": "trainer: {max_steps: 1}\ntrainer: {max_epochs: 1}\n"},
            "size --config tiny.yaml --config two.yaml",
            "trainer is written twice, in lines 1 and 2",
        ),
    ],
)
def test_a_key_that_is_written_twice_is_refused_with_its_lines(
    files: dict[str, str], typed: str, says: str, working_folder: Path, refusal
) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    assert says in refusal(*shlex.split(typed))


def test_a_nested_file_that_is_no_yaml_is_named(working_folder: Path, refusal) -> None:
    Path("cut.yaml").write_text("class_path: [\n")
    error = refusal("fit", "--config=tiny.yaml", "--model.attention=cut.yaml")
    assert "cut.yaml cannot be read (while parsing" in error


@pytest.mark.parametrize("section", ["class_path", "init_args"])
def test_an_empty_class_in_a_nested_file_is_named(
    section: str, working_folder: Path, refusal
) -> None:
    spec = {"class_path": "anlit.ScaleInvariant", "init_args": {"tau": 3}, section: None}
    Path("part.yaml").write_text(yaml.safe_dump(spec))
    error = refusal("fit", "--config=tiny.yaml", "--model.attention=part.yaml")
    assert f"part.yaml: {section} is empty: give " in error


def test_a_key_that_a_merge_replaces_is_written_once() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
    }


@pytest.mark.parametrize(
    "text", ["no", "on", "007", "2024_11", "10:00:00:00", "1:30.5", "2024-01-01"]
)
def test_what_may_be_a_name_is_a_text_in_yaml(text: str) -> None:
    assert parse_yaml(f"path: {text}") == {"path": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e4", 10_000),
        ("1.5e4", 15_000),
        ("1_000_000", 1_000_000),
        ("0x1F", 31),
        ("-5", -5),
        ("1e-3", 1e-3),
        ("1.25e1", 12.5),
        (".inf", float("inf")),
        ("1.", 1.0),
        ("~", None),
        ("true", True),
    ],
)
def test_a_number_is_a_number_with_its_type(text: str, value: Any) -> None:
    for parse in (parse_yaml, parse_scalar):
        assert parse(text) == value
        assert type(parse(text)) is type(value)


def test_a_dumped_value_comes_back(tmp_path: Path) -> None:
    values = ["no", "007", "2024_11", "10:00", "1e4", "~", "null", "1.0", 1e-9, 1e4, 3, True, None]
    (tmp_path / "config.yaml").write_text(dump_yaml(values))
    assert read_yaml(tmp_path / "config.yaml") == values


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("trainer: {max_time: 10:00:00:00}", "trainer.max_time", "10:00:00:00"),
        ("trainer: {max_steps: 1e4}", "trainer.max_steps", 10_000),
        ("trainer: {max_steps: 1_000}", "trainer.max_steps", 1000),
        ("trainer: {max_steps: 010}", "trainer.max_steps", 10),
        ("data: {init_args: {path: 2024_11}}", "data.init_args.path", "2024_11"),
        ("data: {init_args: {path: no}}", "data.init_args.path", "no"),
        ("data: {init_args: {path: 007}}", "data.init_args.path", "007"),
        ("data: {init_args: {shuffle: no}}", "data.init_args.shuffle", False),
        ("data: {init_args: {cache_gb: 1e2}}", "data.init_args.cache_gb", 100.0),
    ],
)
def test_a_value_in_a_file_is_what_its_key_needs(
    text: str, key: str, value: Any, working_folder: Path, printed_config
) -> None:
    Path("own.yaml").write_text(text)
    config = printed_config("--config=tiny.yaml", "--config=own.yaml")
    assert value_at(config, key) == value
    assert type(value_at(config, key)) is type(value)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--trainer.max_steps=1e4", "trainer.max_steps", 10_000),
        ("--trainer.max_time=10:00:00:00", "trainer.max_time", "10:00:00:00"),
        ("--data.path=1e4", "data.init_args.path", "1e4"),
        ("--data.shuffle=no", "data.init_args.shuffle", False),
        ("--data.seed=010", "data.init_args.seed", 10),
    ],
)
def test_an_option_is_read_as_a_file_is(
    option: str, key: str, value: Any, working_folder: Path, printed_config
) -> None:
    assert value_at(printed_config("--config=tiny.yaml", option), key) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "data: {init_args: {path: 2024}}",
            'data.path=2024 is of the wrong type: give a text, with quotes: "2024"',
        ),
        (
            "data: {init_args: {path: true}}",
            'data.path=true is of the wrong type: give a text, with quotes: "true"',
        ),
        ("run_dir: 2024", 'run_dir=2024 is of the wrong type: give a text, with quotes: "2024"'),
        (
            "trainer: {max_steps: 10:00}",
            "trainer.max_steps=10:00 is of the wrong type: give an integer",
        ),
        (
            "trainer: {max_steps: 1.25e1}",
            "trainer.max_steps=12.5 is of the wrong type: give an integer",
        ),
        ("trainer:", "trainer is empty: give settings below it, or leave it out"),
        (
            "trainer: {log_every_n_steps: }",
            "trainer.log_every_n_steps is empty: give an integer; the default is 10",
        ),
        (
            "model: {init_args: {optimizer: {init_args: {betas: [0.9]}}}}",
            "model.optimizer.betas=[0.9] is of the wrong type: give a list of 2 values such as",
        ),
        (
            "model: {init_args: {optimizer: {init_args: {betas: 0.9}}}}",
            "model.optimizer.betas=0.9 is of the wrong type: give a list such as [0.9, 0.95]",
        ),
        (
            "model: {init_args: {schedule: {class_path: anlit.Foo}}}",
            "model.schedule names anlit.Foo, which is not a class for it, since anlit has no "
            "Foo: choose Constant, Cosine",
        ),
        (
            "model: {init_args: {lr: 3}}",
            "model.lr is not a setting of anlit.GPT: did you mean model.optimizer.lr?",
        ),
        (
            "model: {init_args: {warmup: 0.1}}",
            "model.warmup is not a setting of anlit.GPT: did you mean model.schedule",
        ),
        (
            "trainer: {max_step: 3}",
            "trainer.max_step is not a setting of anlit fit: did you mean trainer.max_steps?",
        ),
        (
            "fit: {model: {init_args: {n_layers: 2}}}",
            "fit.model.init_args.n_layers is not a setting of anlit fit: did you mean "
            "model.init_args.n_layers?",
        ),
        (
            "optimizer: {lr: 1}",
            "optimizer.lr is not a setting of anlit fit: did you mean --model.optimizer.lr?",
        ),
        (
            "trainer: {logger: wandb}",
            "trainer.logger names wandb, which is not a class for it: choose CSVLogger, "
            "TensorBoardLogger or --config logger/wandb.yaml",
        ),
    ],
)
def test_a_wrong_value_in_a_file_is_one_sentence(
    text: str, says: str, working_folder: Path, refusal
) -> None:
    Path("own.yaml").write_text(text)
    assert says in refusal("fit", "--config=tiny.yaml", "--config=own.yaml")


@pytest.mark.parametrize("command", ["validate", "test"])
def test_an_evaluation_of_nothing_asks_for_a_run_folder(
    command: str, working_folder: Path, refusal
) -> None:
    assert f"give a run folder, as in anlit {command} runs/gpt" in refusal(command)


@pytest.mark.parametrize("key", ["seeds", "equal_tuning", "baseline", "shared", "sections"])
def test_an_empty_value_in_a_study_is_refused(key: str, working_folder: Path, refusal) -> None:
    study = {"seeds": [1], "arms": {"a": {"configs": ["tiny.yaml"]}}, key: None}
    Path("study.yaml").write_text(yaml.safe_dump(study))
    assert f"study.yaml has no value for '{key}'" in refusal("study", "--config=study.yaml")


def test_the_home_folder_is_the_same_for_all_parts_of_a_run(
    working_folder: Path, monkeypatch
) -> None:
    home = working_folder / "home"
    home.mkdir()
    (home / "data").symlink_to((working_folder / "data").resolve())
    monkeypatch.setenv("HOME", str(home))
    user_file = {"run_dir": "~/runs/a", "data": {"init_args": {"path": "~/data"}}}
    (home / "own.yaml").write_text(yaml.safe_dump(user_file))
    fit = ["fit", "--config=tiny.yaml", "--config=~/own.yaml"]
    assert main(fit) == 0
    assert {"config.yaml", "run.json", "metrics.csv"} <= set(os.listdir(home / "runs" / "a"))
    assert not (working_folder / "~").exists()
    assert main([*fit, "--ckpt_path=last", "--trainer.max_steps=2"]) == 0
    assert main(["validate", "~/runs/a"]) == 0
    lengths = ["lengths", "~/runs/a", "--output=~/report", "--lengths=16", "--tokens=64"]
    assert main(lengths) == 0
    assert (home / "report").is_dir()
    assert anlit.TokenShards("~/data").path == str(home / "data")


def test_validate_takes_a_run_folder_its_config_or_its_checkpoint(
    working_folder: Path, refusal
) -> None:
    for path in ("run", "run/config.yaml", "run/checkpoints/last.ckpt"):
        assert main(["validate", path, "--trainer.enable_progress_bar=false"]) == 0
    assert "data is not a run folder with a config.yaml: give a run folder" in refusal(
        "validate", "data"
    )
    assert "nowhere is not a run folder" in refusal("test", "nowhere")


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        (["--model.attention=ALiBi"], True),
        (
            [
                "--model.attention="
                "{class_path: SlidingWindow, init_args: {width: 4, mechanism: ALiBi}}"
            ],
            True,
        ),
        (["--model.attention=ALiBi", "--model.positions=NoPE"], False),
        (["--model.attention=ScaleInvariant"], False),
    ],
)
def test_biases_beside_positions_are_said_at_the_start(
    options: list[str], is_said: bool, working_folder: Path, caplog
) -> None:
    with caplog.at_level(logging.WARNING, "anlit"):
        assert main(["fit", "--config=tiny.yaml", *options]) == 0
    warning = "ALiBi is published without positions, and this model has RoPE too"
    assert (warning in caplog.text) == is_said


def test_an_optimizer_that_fails_in_its_own_code_is_named(working_folder: Path, refusal) -> None:
    """SparseAdam refuses dense gradients in its step."""
    error = refusal("fit", "--config=tiny.yaml", "--model.optimizer=torch.optim.SparseAdam")
    assert "model.optimizer=SparseAdam cannot take its step (SparseAdam does not support" in error


class PatienceIsOver(EarlyStopping):
    """A user's own, without a telling name."""


def test_a_callback_that_stops_is_known_by_its_class(working_folder: Path) -> None:
    name = f"{__name__}.PatienceIsOver"
    stop = f"{{class_path: {name}, init_args: {{monitor: val/loss, min_delta: 5, patience: 1}}}}"
    steps = ["--trainer.max_steps=9", "--trainer.val_check_interval=1"]
    assert main(["fit", "--config=tiny.yaml", f"--trainer.callbacks=[{stop}]", *steps]) == 0
    assert "by PatienceIsOver" in read_yaml("new/run.json")["stopped_early"]


@pytest.mark.parametrize("option", ["--vocab_size=1e3", "--workers=1e0"])
def test_a_tool_takes_a_count_with_an_exponent(option: str) -> None:
    from anlit.commands.prepare import parser

    options = parser().parse_args(["PythonSources", option])
    assert type(getattr(options, option[2:].split("=")[0])) is int


def test_what_the_loader_needs_of_jsonargparse_is_there() -> None:
    assert callable(jsonargparse._typehints.basic_json_or_yaml_load)
    assert jsonargparse._util.config_load_stack.get() == ()
