"""Completion of commands and files in a shell, written by shtab."""

import argparse
from collections.abc import Mapping

from anlit.commands.benchmark import BENCHMARKS
from anlit.errors import UserError

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: str, commands: Mapping[str, str]) -> str:
    """The script that teaches a shell `anlit`: its commands, --config and other files, names of benchmarks.

    Options of single commands are not in it: to know them all of torch and Lightning would have to be imported.

    Args:
        shell: One of `SHELLS`.
        commands: Name → description.

    Raises:
        UserError: The shell is not known, or shtab is not installed.
    """
    if shell not in SHELLS:
        raise UserError(f"--print_completion {shell} is not known: choose one of {', '.join(SHELLS)}")
    try:
        import shtab
    except ImportError as error:
        raise UserError("--print_completion needs shtab: run `make extras EXTRAS=completion`") from error
    parser = argparse.ArgumentParser(prog="anlit")
    parser.add_argument("--version", action="store_true")
    below = parser.add_subparsers()
    for name, what in commands.items():
        one = below.add_parser(name, help=what.split(":")[0])
        for option in ("--config", "--output"):
            one.add_argument(option).complete = shtab.FILE  # type: ignore[attr-defined]
        if name == "benchmark":
            one.add_argument("benchmark", choices=list(BENCHMARKS))
        else:
            one.add_argument("files", nargs="*").complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
