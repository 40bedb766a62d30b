"""Its parser understands every `anlit` command in the documentation. Nothing is started."""

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands import size
from anlit.commands.arguments import expand_arguments
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.study.read_study import read_study
from tests.docs.pages import PAGES, ROOT, commands, files, name, shell_lines

COMMANDS_OF_PAGES = []
for page in PAGES:
    for command in commands(page):
        typed = " ".join(command)[:60]
        COMMANDS_OF_PAGES.append(pytest.param(command, id=f"{name(page)}:{typed}"))
RUNS = ("gpt", "angpt", "constant", "kept-steps", "bytes")
"""Run folders that later commands read: of README, training-options.md and data.md."""
Patch = pytest.MonkeyPatch


class ParsedError(BaseException):
    """Raised once a command has parsed its options, in place of its work."""


@pytest.fixture(scope="module")
def fit_command() -> Any:
    """fit_command(name) → the object that reads the configuration of a subcommand."""
    classes = ["--model=GPT", "--data=PythonSources"]
    return functools.cache(lambda name: read_command(ConfigurationParser, [name, *classes]))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, fit_command: Any) -> Path:
    """The reader's folder: the files of the pages, and config.yaml in their run folders."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for file, content in files(page):
            (folder / file).write_text(content, encoding="utf-8")
    fit = ["fit", "--config", "model/angpt.yaml", "--config", str(folder / "small.yaml")]
    parser = fit_command("fit").parser
    settings = parser.parse_args(expand_arguments(fit))
    config = yaml.safe_load(parser.dump(settings, skip_none=False))["fit"]
    for run in RUNS:
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "config.yaml").write_text(yaml.safe_dump(config))
    imported = folder / "imported" / "qwen3"  # as `anlit import` writes it
    imported.mkdir(parents=True)
    (imported / "model.yaml").write_text("model: {class_path: anlit.GPT}")
    return folder


def only_prints(options: list[str]) -> bool:
    """Return whether the command prints its configuration or the help of a class, and exits."""
    return "--print_config" in options or any(option.endswith(".help") for option in options)


def parse_tool(command: list[str], monkeypatch: Patch) -> Any:
    """Return the parsed options of a command without Lightning."""
    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            parse = getattr(argparse.ArgumentParser, name)
            stopping = functools.partialmethod(stop_when_parsed, parse)
            patch.setattr(argparse.ArgumentParser, name, stopping)
        with pytest.raises(ParsedError) as parsed:
            main(command)
    return parsed.value.args[0]


def stop_when_parsed(parser: Any, parse: Any, *arguments: Any) -> None:
    raise ParsedError(parse(parser, *arguments))


@pytest.mark.parametrize("command", COMMANDS_OF_PAGES)
def test_command_is_understood(
    command: list[str], fit_command: Any, prepared: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    subcommand, *options = command
    assert subcommand in COMMANDS, f"anlit has no command {subcommand}"
    if subcommand == "size":
        _, options = size.parser().parse_known_args(options)
        subcommand = "fit"

    if subcommand not in LIGHTNING:
        parsed = parse_tool([subcommand, *options], monkeypatch)
        if subcommand == "study":
            read_study(parsed.config, parsed.budget)
    elif only_prints(options):
        with pytest.raises(SystemExit, match=r"^(0|None)?$"):
            fit_command(subcommand).parse_again([subcommand, *options])
    else:
        fit_command(subcommand).parse_again([subcommand, *options])


def test_pages_have_commands_for_what_anlit_does() -> None:
    subcommands = {parameters.values[0][0] for parameters in COMMANDS_OF_PAGES}

    assert subcommands >= set(COMMANDS) - {"test"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_can_be_copied(page: Path) -> None:
    """No ellipsis stands for an argument, and every target of make exists."""
    rules = [line for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line]
    targets = {rule.split(":")[0] for rule in rules}

    for line in shell_lines(page):
        assert "…" not in line or page.parent.name == "docker", line
        assert not line.startswith("make ") or line.split()[1] in targets, line
