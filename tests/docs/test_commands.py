"""Every `anlit` command in the documentation is understood by the parser that would run it; nothing is started."""

import argparse
import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.analysis.study.plan import read_study
from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands import size, study
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.shipped import with_configuration_files
from tests.docs.pages import PAGES, ROOT, commands, files, name, shell_lines

ALL = [(name(page), words) for page in PAGES for words in commands(page)]
TRAINED = ("gpt", "angpt")
"""The run folders of the README; other pages go on with them."""


class ParsedError(BaseException):
    """Raised in place of what a command does once its options are understood."""


@pytest.fixture(scope="module")
def fit_parser() -> Any:
    """LightningCLI's parser of a subcommand, by its name, as `anlit.commands.fit.main` makes it."""
    return functools.cache(
        lambda name: read_command(ConfigurationParser, [name, "--model=GPT", "--data=PythonSources"]).parser
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, fit_parser: Any) -> Path:
    """The files that the pages tell the reader to write, and a config.yaml in each run folder that they name."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for file, content in files(page):
            (folder / file).write_text(content, encoding="utf-8")
    small = ["fit", "--config", "model/angpt.yaml", "--config", str(folder / "small.yaml")]
    parser = fit_parser("fit")
    parsed = parser.parse_args(with_configuration_files(small))
    config = yaml.safe_load(parser.dump(parsed, skip_none=False))["fit"]
    for run in TRAINED:
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "imported" / "qwen3").mkdir(parents=True)
    (folder / "imported" / "qwen3" / "model.yaml").write_text("model: {class_path: anlit.GPT}")  # `anlit import` did
    return folder


@pytest.fixture
def working_folder(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, from which commands run."""
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    return prepared


@contextlib.contextmanager
def _stops_when_parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, a command ends with ParsedError as soon as argparse has accepted its options."""

    def stopping(method: Callable[..., Any]) -> Callable[..., Any]:
        def parse(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
            method(parser, *arguments, **options)
            raise ParsedError

        return parse

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args))
        yield


def check(words: list[str], fit_parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse one command.

    Raises:
        Exception: The parser refuses it, in the way that its command does.
    """
    command, *options = words
    assert command in COMMANDS, f"anlit has no command {command}"
    if command == "size":
        _, options = size.parser().parse_known_args(options)
        command = "fit"
    if command not in LIGHTNING:
        with _stops_when_parsed(monkeypatch), pytest.raises(ParsedError):
            main([command, *options])
        if command == "study":
            given = study.parser().parse_args(options)
            read_study(given.config, given.budget)
        return
    if "--print_config" in options or any(option.endswith(".help") for option in options):
        with pytest.raises(SystemExit) as end:
            fit_parser(command).parse_args(with_configuration_files([command, *options]))
        assert end.value.code in (0, None)
        return
    fit_parser(command).parse_args(with_configuration_files([command, *options]))


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}:{' '.join(words)[:60]}" for page, words in ALL])
def test_command_is_understood(
    page: str, words: list[str], fit_parser: Any, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(words, fit_parser, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "fit --config model/nonesuch.yaml",
        "fit --config model/gpt.yaml --model.n_layer 3",
        "score runs/gpt texts/one.txt --nonsense",
        "prepare",
        "study --config study/nonesuch.yaml",
        "study --config study/convergence.yaml --budget huge",
        "train --config model/gpt.yaml",
        "size --config model/gpt.yaml --gpus many",
        "benchmark step --preset none",
    ],
)
def test_wrong_command_would_be_noticed(
    line: str, fit_parser: Any, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check(shlex.split(line), fit_parser, monkeypatch)


def test_pages_have_commands_for_what_anlit_does() -> None:
    assert {words[0] for _, words in ALL} >= set(COMMANDS) - {"test"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_can_be_copied(page: Path) -> None:
    """No ellipsis stands for something; every target of make exists."""
    if page.parent.name != "docker":
        for line in shell_lines(page):
            assert "…" not in line, line
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    for line in shell_lines(page):
        if line.startswith("make "):
            assert line.split()[1] in targets, line
