"""A class that changes between files: which settings it keeps, and which a sentence names."""

from pathlib import Path

import pytest

import anlit
from anlit.commands.class_changes import class_change_messages
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.config.objects import parameters_of
from anlit.io.read import read_yaml
from tests.integration.conftest import fit_arguments, run

MODEL_AND_DATA = ["--model=AnGPT", "--data=FineWeb"]
WSD = "model: {init_args: {schedule: {class_path: anlit.WSD, init_args: {decay: 0.1}}}}"
COSINE = "model: {init_args: {schedule: {class_path: anlit.Cosine}}}"
ADAMW = "model: {init_args: {optimizer: {class_path: anlit.AdamW, init_args: {fused: true}}}}"
USUAL_OPTIMIZER = "model: {init_args: {optimizer: {init_args: {fused: true, eps: 1.0e-8}}}}"
WINDOW = """
model:
  init_args:
    attention:
      class_path: anlit.SlidingWindow
      init_args:
        width: 8
        mechanism: {class_path: anlit.ScaleInvariant, init_args: {tau: 3}}
"""
LOGN_IN_WINDOW = """
model:
  init_args:
    attention:
      class_path: anlit.SlidingWindow
      init_args: {width: 4, mechanism: {class_path: anlit.LogN}}
"""
DDP = """
trainer:
  strategy:
    class_path: lightning.pytorch.strategies.DDPStrategy
    init_args: {find_unused_parameters: true}
"""
FULLY_SHARDED = "trainer: {strategy: {class_path: anlit.FullySharded}}"
EMA = """
trainer:
  callbacks+:
    - {class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}
"""
ADDED_NOISE = "trainer: {callbacks+: [{class_path: anlit.training.callbacks.GradientNoiseScale}]}"
NOISE = ADDED_NOISE.replace("+", "")
NO_CALLBACKS = "trainer: {callbacks: null}"
REPLACED = (
    "EMAWeightAveraging left out, a later trainer.callbacks replaces the list, "
    "trainer.callbacks+ would add to it."
)
WSD_DEFAULTS = {parameter.name: parameter.default for parameter in parameters_of(anlit.WSD)}
MUON = "model: {init_args: {optimizer: {class_path: anlit.MuonAdamW}}}"


def messages_of(first: str, second: str, folder: Path) -> list[str]:
    """The messages of a configuration of two files with these contents."""
    (folder / "first.yaml").write_text(first)
    (folder / "second.yaml").write_text(second)
    files = [f"--config={folder}/first.yaml", f"--config={folder}/second.yaml"]
    command = read_command(ConfigurationParser, ["fit", *MODEL_AND_DATA, *files])
    messages = class_change_messages(command.config["fit"])
    return [message.removeprefix(f"{folder}/") for message in messages]


@pytest.mark.parametrize(
    ("first", "second", "dropped"),
    [
        (ADAMW, MUON, "fused left out, MuonAdamW has no such model.optimizer settings."),
        (USUAL_OPTIMIZER, MUON, "fused left out, MuonAdamW has no such model.optimizer settings."),
        (EMA, NOISE, REPLACED),
        (EMA, NO_CALLBACKS, REPLACED),
        (WSD, COSINE, "decay left out, Cosine has no such model.schedule settings."),
        (
            WINDOW,
            LOGN_IN_WINDOW,
            "tau left out, LogN has no such model.attention.mechanism settings.",
        ),
        (
            DDP,
            FULLY_SHARDED,
            "find_unused_parameters left out, FullySharded has no such trainer.strategy settings.",
        ),
    ],
)
def test_a_nested_class_that_changes_names_the_settings_it_drops(
    first: str, second: str, dropped: str, tmp_path: Path
) -> None:
    assert messages_of(first, second, tmp_path) == [f"first.yaml: {dropped}"]


@pytest.mark.parametrize(
    ("first", "second"), [(WINDOW, WINDOW), (MUON, MUON), (DDP, DDP), (EMA, ADDED_NOISE)]
)
def test_a_class_that_stays_is_not_mentioned(first: str, second: str, tmp_path: Path) -> None:
    assert messages_of(first, second, tmp_path) == []


def test_a_run_prints_the_settings_that_another_model_drops(
    shards: Path, tmp_path: Path, capfd
) -> None:
    file = tmp_path / "gpt.yaml"
    settings = "init_args: {init_std: 0.03, norm_eps: 1.0e-5}"
    file.write_text(f"model: {{class_path: anlit.GPT, {settings}}}")
    options = [f"--config={file}", "--trainer.fast_dev_run=1"]

    exit_code = run(fit_arguments(shards, tmp_path / "run", *options))

    output = capfd.readouterr().out
    assert exit_code == 0
    assert f"{file}: init_std left out, AnGPT has no such model settings." in output


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        pytest.param(
            ["--model.optimizer=torch.optim.Adam"],
            "optimizer.init_args.betas",
            (0.9, 0.999),
            id="an option, over AdamW's default",
        ),
        pytest.param(
            ["--model.optimizer.eps=1e-7", "--model.optimizer=torch.optim.Adam"],
            "optimizer.init_args.eps",
            1e-7,
            id="given for the earlier class",
        ),
        pytest.param(
            ["--model.schedule=anlit.WSD"],
            "schedule.init_args.warmup",
            WSD_DEFAULTS["warmup"],
            id="a schedule",
        ),
        pytest.param(
            ["--model.schedule.warmup=0.0", "--model.schedule=anlit.WSD"],
            "schedule.init_args.warmup",
            0.0,
            id="given, and equal to the earlier default",
        ),
    ],
)
def test_another_class_keeps_what_was_given_and_no_default_of_the_earlier_class(
    arguments: list[str], key: str, expected: object
) -> None:
    command = read_command(ConfigurationParser, ["fit", *MODEL_AND_DATA, *arguments])

    settings = command.config["fit"].model.init_args
    assert settings[key] == expected


RUN_OF_GPT = ["--model=GPT", "--data=FineWeb", "--model.optimizer.eps=1e-7"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["--model.optimizer=torch.optim.Adam"], id="optimizer"),
        pytest.param(
            ["--model.optimizer=torch.optim.Adam", "--model.optimizer.betas=[0.9,0.95]"],
            id="a default of the earlier class, given later",
        ),
        pytest.param(["--model=AnGPT"], id="model"),
        pytest.param(["--model.attention=ScaleInvariant"], id="attention"),
        pytest.param(["--model.schedule=anlit.WSD"], id="schedule"),
        pytest.param(["--data=OpenWebText"], id="data"),
        pytest.param(["--model.d_model=64"], id="no class"),
    ],
)
def test_a_written_configuration_gives_another_class_what_its_sources_gave(
    changes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", *RUN_OF_GPT, "--print_config"]) == 0
    written = tmp_path / "config.yaml"
    written.write_text(capfd.readouterr().out)

    from_written = read_command(ConfigurationParser, ["fit", f"--config={written}", *changes])
    from_sources = read_command(ConfigurationParser, ["fit", *RUN_OF_GPT, *changes])

    settings = from_written.config["fit"].as_dict()
    expected = from_sources.config["fit"].as_dict()
    assert settings | {"config": None} == expected | {"config": None}
    assert not list(class_change_messages(from_written.config["fit"]))


@pytest.mark.parametrize("source", ["an option", "a file"])
def test_a_file_may_give_a_class_of_a_run(shards: Path, tmp_path: Path, source: str) -> None:
    file = tmp_path / "adam.yaml"
    file.write_text("{class_path: torch.optim.Adam, init_args: {lr: 0.002}}")
    options = [f"--model.optimizer={file}"]
    if source == "a file":
        (tmp_path / "run.yaml").write_text(f"model: {{init_args: {{optimizer: {file}}}}}")
        options = [f"--config={tmp_path}/run.yaml"]
    steps = ["--trainer.max_steps=1"]

    assert run(fit_arguments(shards, tmp_path / "run", *options, *steps)) == 0

    optimizer = read_yaml(tmp_path / "run" / "config.yaml")["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.Adam"
    assert optimizer["init_args"]["lr"] == 0.002
    assert optimizer["init_args"]["eps"] == 1e-8
    assert optimizer.keys() == {"class_path", "init_args"}
