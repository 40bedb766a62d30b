"""Every `anlit` command in the documentation is understood by the parser that would run it; nothing is started."""

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands import size
from anlit.commands.parser import ConfigurationParser, read_command, with_configuration_files
from anlit.study.plan import read_study
from tests.docs.pages import PAGES, ROOT, commands, files, name, shell_lines

ALL = [(name(page), words) for page in PAGES for words in commands(page)]
TRAINED = ("gpt", "angpt")  # the run folders of the README; other pages go on with them
Patch = pytest.MonkeyPatch


class ParsedError(BaseException):
    """Raised in place of what a command does once its options are understood."""


@pytest.fixture(scope="module")
def fit_command() -> Any:
    """What reads the configuration of a subcommand, by its name."""
    classes = ["--model=GPT", "--data=PythonSources"]
    return functools.cache(lambda name: read_command(ConfigurationParser, [name, *classes]))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, fit_command: Any) -> Path:
    """The reader's folder: files that the pages tell to write, and a config.yaml in each run folder that they name."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for file, content in files(page):
            (folder / file).write_text(content, encoding="utf-8")
    small = ["fit", "--config", "model/angpt.yaml", "--config", str(folder / "small.yaml")]
    parser = fit_command("fit").parser
    config = yaml.safe_load(
        parser.dump(parser.parse_args(with_configuration_files(small)), skip_none=False)
    )["fit"]
    for run in TRAINED:
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "imported" / "qwen3").mkdir(parents=True)
    (folder / "imported" / "qwen3" / "model.yaml").write_text(
        "model: {class_path: anlit.GPT}"
    )  # `anlit import` did
    return folder


def check(words: list[str], fit_command: Any, prepared: Path, monkeypatch: Patch) -> None:
    """Parse one command in the reader's folder; raises what its command does if the parser refuses it."""
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    command, *options = words
    assert command in COMMANDS, f"anlit has no command {command}"
    if command == "size":
        _, options = size.parser().parse_known_args(options)
        command = "fit"
    if command in LIGHTNING:
        asks = "--print_config" in options or any(option.endswith(".help") for option in options)
        with pytest.raises(SystemExit, match=r"^(0|None)?$") if asks else contextlib.nullcontext():
            fit_command(command).read([command, *options])
        return
    parse_args = argparse.ArgumentParser.parse_args

    def stop_when_parsed(*arguments: Any) -> None:
        raise ParsedError(parse_args(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop_when_parsed)
        with pytest.raises(ParsedError) as parsed:
            main([command, *options])
    if command == "study":
        (given,) = parsed.value.args
        read_study(given.config, given.budget)


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{page}:{' '.join(words)[:60]}") for page, words in ALL]
)
def test_command_is_understood(
    words: list[str], fit_command: Any, prepared: Path, monkeypatch: Patch
) -> None:
    check(words, fit_command, prepared, monkeypatch)


def test_pages_have_commands_for_what_anlit_does() -> None:
    assert {words[0] for _, words in ALL} >= set(COMMANDS) - {"test"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_can_be_copied(page: Path) -> None:
    """No ellipsis stands for something; every target of make exists."""
    targets = {
        line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line
    }
    for line in shell_lines(page):
        assert "…" not in line or page.parent.name == "docker", line
        assert not line.startswith("make ") or line.split()[1] in targets, line
