"""A setting has the value that the user wrote, or a sentence refuses it."""

import copy
import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping

import anlit
from anlit.cli import main
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.errors import UserError
from anlit.io.read import dump_yaml, parse_scalar, parse_yaml, read_yaml
from anlit.training.optim.schedule import Cosine
from tests.checkpoints.foreign import trained
from tests.integration.cases import slow_cases

SHAPE = {"vocab_size": 320, "context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16}
TINY: dict[str, Any] = {
    "model": {"class_path": "anlit.GPT", "init_args": SHAPE},
    "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "data", "batch_size": 2}},
    "trainer": {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False},
    "run_dir": "new",
}
TAKE_NULL = {
    "run_dir",
    "trainer.enable_progress_bar",
    "trainer.gradient_clip_val",
    "model.init_args.vocab_size",
    "model.init_args.optimizer.init_args.lr",
}
"""Settings whose null means something: no clipping, a rate by width."""


@pytest.fixture(scope="module")
def trained_place(tmp_path_factory) -> Path:
    working_folder = tmp_path_factory.mktemp("settings")
    trained(working_folder, "GPT")
    return working_folder


@pytest.fixture
def working_folder(trained_place: Path, tmp_path: Path, monkeypatch) -> Path:
    """A working directory with `data`, `run` and tiny.yaml."""
    for name in ("data", "run"):
        (tmp_path / name).symlink_to(trained_place / name)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def value_at(config: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


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
            "model.schedule names anlit.Foo, which is not a class for it: choose Constant, Cosine",
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
    assert "data is no run folder with a config.yaml: give a run folder" in refusal(
        "validate", "data"
    )
    assert "nowhere is no run folder" in refusal("test", "nowhere")


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
