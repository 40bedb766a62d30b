"""`--help` is complete, and describes anlit where Lightning's text would not hold."""

import argparse
import inspect
import re

import pytest
from docstring_parser import parse as parse_docstring

import anlit
from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands.benchmark import BENCHMARKS
from anlit.commands.parser import ConfigurationParser, read_command
from anlit.nn.models.angpt import AnGPTConfig
from anlit.nn.models.gpt import GPTConfig
from anlit.nn.models.ngpt import NGPTConfig

TOOLS = sorted(set(COMMANDS) - {*LIGHTNING, "benchmark"})
TOOLS += [f"benchmark {name}" for name in BENCHMARKS]
SAYS_WHAT_NULL_IS = re.compile(r"\bnull\b|\bdefault\b|\bnone\b|\bwithout\b", re.IGNORECASE)
CONFIGS = (GPTConfig, NGPTConfig, AnGPTConfig)
PUBLIC = [getattr(anlit, name) for name in dir(anlit)]
CLASSES = [*CONFIGS, *(member for member in PUBLIC if inspect.isclass(member))]
"""Classes whose arguments are settings."""


def parser_of_tool(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser that prints the help of a command without Lightning."""
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: parsers.append(self))
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return parsers[0]


def help_text(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an option with its default filled in."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def shown_value(default: str | float) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("command", TOOLS)
def test_help_explains_each_option_and_gives_its_default(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = parser_of_tool(command, monkeypatch)

    for action in parser._actions:
        text = help_text(parser, action).replace(",", "")
        assert text, f"{action.dest} has no help"
        if action.default != argparse.SUPPRESS and type(action.default) in (str, int, float):
            assert shown_value(action.default) in text, f"{action.dest} has no default in its help"


def descriptions(cls: type) -> dict[str, str]:
    """Return the arguments that a class and its bases describe, and their descriptions."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for method in (base, base.__dict__.get("__init__")):
            for argument in parse_docstring(getattr(method, "__doc__", None) or "").params:
                texts[argument.arg_name] = argument.description or ""
    return texts


def optional_arguments(cls: type) -> list[str]:
    """Return the arguments of a class, and of its bases, whose default is None."""
    names = []
    for base in cls.__mro__:
        if "__init__" in base.__dict__ and base.__module__.startswith("anlit."):
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if parameter.default is None:
                    names.append(name)
    return names


def test_null_is_explained_where_it_is_the_default() -> None:
    unexplained = []
    for cls in CLASSES:
        texts = descriptions(cls)
        for name in optional_arguments(cls):
            if not SAYS_WHAT_NULL_IS.search(texts.get(name, "")):
                unexplained.append(f"{cls.__name__}.{name}: {texts.get(name)}")

    assert unexplained == []


@pytest.mark.parametrize("command", LIGHTNING)
def test_ckpt_path_is_explained_as_anlit_reads_it(command: str) -> None:
    """Lightning's text offers addresses, `hpc` and a registry, which anlit refuses."""
    arguments = [command, "--model=GPT", "--data=PythonSources"]
    parser = read_command(ConfigurationParser, arguments).parser_of(command)

    (checkpoint,) = [action for action in parser._actions if action.dest == "ckpt_path"]

    assert "`last` or `best`" in checkpoint.help
    assert not re.search(r"URL|hpc|registry", checkpoint.help)
    assert [group.title for group in parser._action_groups if len(group.title) > 79] == []
