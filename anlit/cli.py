"""The command `anlit`: LightningCLI's subcommands and the tools.

`anlit --help` answers without importing torch.
"""

import argparse
import importlib
import logging
import os
import select
import sys
import threading
from contextlib import nullcontext, suppress
from typing import Any, TextIO

import anlit
from anlit.commands import COMMANDS, EVALUATIONS, FILES, LIGHTNING
from anlit.commands.working_directory import import_from_working_directory
from anlit.config.options import NAMES_OF_FILES, ToolParser
from anlit.errors import (
    INTERRUPTED,
    PREEMPTED,
    RUN_FOLDER,
    Preempted,
    UserError,
    install_advice,
    report_unforeseen,
    tokenizer_panics_as_errors,
)
from anlit.reporting.text import VisibleRecord, discard_unwritable, echo
from anlit.signals import preempted_by_signals
from anlit.training.lazy_torchmetrics import make_torchmetrics_lazy

RESTARTABLE = (*LIGHTNING, "study", "prepare")
"""Commands that a signal ends in order, so that they can be started again."""
NAMING_CLASSES = (*LIGHTNING, "size", "study")
"""Commands whose configuration may name classes of any module."""
USAGE = """\
anlit {version}: train and compare GPT+, nGPT and anGPT

usage: anlit COMMAND [OPTIONS]

commands:
{commands}

anlit COMMAND --help lists the options of one command; anlit fit --print_config
prints the resolved YAML, --model.help AnGPT and --data.help TextFiles explain
one class's settings. anlit --print_completion bash prints the completion for a
shell (bash, zsh, tcsh, fish). Every command takes --import MODULE, for a
model, a mechanism or data of your own that a checkpoint names.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (without the program's name) and return the exit code.

    - 0: success
    - 1: the run failed or was interrupted
    - 2: the user's command, configuration or data is wrong; a sentence on standard error says why
    - 75: a signal (SIGTERM, SIGHUP, SIGUSR1) or `max_time` ended the run, or a study was
      interrupted. The run has a checkpoint if it made a step.
    - 130: Ctrl-C ended a tool
    """
    logging.setLogRecordFactory(VisibleRecord)
    RUN_FOLDER.set("")
    sys.stdout = sys.stdout or _open_null_device()  # a shell's `>&-` has closed it
    sys.stderr = sys.stderr or _open_null_device()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        try:
            with tokenizer_panics_as_errors():
                return _run(*arguments or ["--help"])
        finally:
            sys.stdout.flush()  # a broken pipe is noticed here, not when Python exits
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except Preempted:
        fix = "start it again, fit with --ckpt_path last where it has a checkpoint"
        return _fail(f"ended by a signal: {fix}", PREEMPTED)
    except BrokenPipeError as error:
        return 1 if _discard_output_without_reader() else _fail(report_unforeseen(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        return _fail(report_unforeseen(error), 1)


def _run(command: str, *arguments: str) -> int:
    """Run a command, or print the help, the version or a completion; return the exit code."""
    if command in COMMANDS:
        return _run_command(command, list(arguments))
    if command in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
        echo(USAGE.format(version=anlit.__version__, commands=commands))
    elif command in ("-V", "--version"):
        echo(f"anlit {anlit.__version__}")
    elif command == "--print_completion":
        echo(_completion(" ".join(arguments) or "bash"))
    else:
        raise UserError(f"unknown command '{command}': choose one of {', '.join(COMMANDS)}")
    return 0


def _run_command(command: str, arguments: list[str]) -> int:
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_restartable = command in RESTARTABLE and is_main_thread
    with preempted_by_signals() if is_restartable else nullcontext():
        if command in NAMING_CLASSES or any(text.startswith("--import") for text in arguments):
            import_from_working_directory()
        arguments = _import_modules(arguments)
        make_torchmetrics_lazy()
        if command in (*LIGHTNING, *EVALUATIONS):  # files with several commands
            arguments = [command, *arguments]
        return _module(command).main(arguments) or 0


def _module(command: str) -> Any:
    return importlib.import_module(f"anlit.commands.{FILES.get(command, command)}")


def _completion(shell: str) -> str:
    """Return shtab's script that completes commands, options and file names in a shell."""
    try:
        import shtab
    except ImportError as error:
        advice = install_advice("completion", "shtab")
        raise UserError(f"--print_completion needs shtab: {advice}") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        shells = ", ".join(shtab.SUPPORTED_SHELLS)
        raise UserError(f"--print_completion {shell} is not known: choose one of {shells}")
    program = argparse.ArgumentParser(prog="anlit")
    subparsers = program.add_subparsers()
    for command, text in COMMANDS.items():
        parser = _parser_to_complete(command)
        for action in vars(parser)["_actions"]:
            if action.metavar in NAMES_OF_FILES:
                action.complete = shtab.FILE
        help_text = text.split(":")[0]
        subparsers.add_parser(command, help=help_text, parents=[parser], add_help=False)
    return str(shtab.complete(program, shell))


def _parser_to_complete(command: str) -> argparse.ArgumentParser:
    """Return a command's parser. LightningCLI's takes seconds: its stand-in has --config alone."""
    if command in LIGHTNING:
        parser = ToolParser()
        parser.add_argument("--config", metavar="FILE")
        return parser
    parser_arguments = [command] if command in EVALUATIONS else []
    return _module(command).parser(*parser_arguments)


def _import_modules(arguments: list[str]) -> list[str]:
    """Import the modules of `--import MODULE`, and return the further arguments."""
    parser = ToolParser(prog="anlit", add_help=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    options, further_arguments = parser.parse_known_args(arguments)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            fix = (
                "give the dotted name of an installed module, or of a file in this folder or "
                "PYTHONPATH"
            )
            raise UserError(f"--import {module} fails ({error}): {fix}") from error
    return further_arguments


def _discard_output_without_reader() -> bool:
    """Discard output without a reader, as after `| head`; return whether there is none."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    has_no_reader = any(event & select.POLLERR for _, event in poll.poll(0))
    if has_no_reader:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_no_reader


def _open_null_device() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _fail(sentence: str, exit_code: int) -> int:
    """Print an error and return its exit code."""
    with suppress(OSError):  # standard error has no reader
        echo(f"anlit: error: {sentence}", sys.stderr)
    discard_unwritable(sys.stderr)
    return exit_code
