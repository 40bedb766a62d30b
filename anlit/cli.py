"""The command `anlit`: LightningCLI's subcommands and the tools. `anlit --help` answers without importing torch."""

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
from anlit.config.options import NAMES_OF_FILES, ToolParser
from anlit.errors import (
    INTERRUPTED,
    PREEMPTED,
    RUN_FOLDER,
    Preempted,
    UserError,
    install,
    panics_told,
    unforeseen,
)
from anlit.reporting.text import VisibleRecord, discard_unwritable, echo
from anlit.signals import preempted_by_signals
from anlit.training.lazy_torchmetrics import make_torchmetrics_lazy

ORDERLY = (*LIGHTNING, "study", "prepare")
"""Commands that a signal ends in order, to be started again."""
USAGE = """\
anlit {version}: train and compare GPT+, nGPT and anGPT

usage: anlit COMMAND [OPTIONS]

commands:
{commands}

anlit COMMAND --help lists the options of one command; anlit fit --print_config
prints the resolved YAML, --model.help AnGPT and --data.help TextFiles explain
one class's settings. anlit --print_completion bash prints the completion for a
shell (bash, zsh, tcsh). Every command takes --import MODULE, for a model, a
mechanism or data of your own that a checkpoint names.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (without the program's name) and return the exit code.

    0: done. 1: the run failed or was interrupted. 2: the user's command, configuration or data is wrong; one
    sentence on standard error says what. 75: the run was preempted (SIGTERM, SIGHUP, SIGUSR1) or is out of `max_time`,
    its checkpoint is written if a step was made; a study was interrupted. 130: a tool was interrupted by Ctrl-C.
    """
    logging.setLogRecordFactory(VisibleRecord)
    RUN_FOLDER.set("")
    sys.stdout = sys.stdout or _nowhere()  # a shell's `>&-` has closed it
    sys.stderr = sys.stderr or _nowhere()
    try:
        try:
            with panics_told():
                return _run(*(sys.argv[1:] if argv is None else argv) or ["--help"])
        finally:
            sys.stdout.flush()  # otherwise Python notices at its end, and complains, that nobody reads
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except Preempted:
        return _fail(
            "ended by a signal: start it again, fit with --ckpt_path last where it has a checkpoint",
            PREEMPTED,
        )
    except BrokenPipeError as error:
        return 1 if _is_stdout_closed() else _fail(unforeseen(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        return _fail(unforeseen(error), 1)


def _run(command: str, *arguments: str) -> int:
    if command in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())
        echo(USAGE.format(version=anlit.__version__, commands=commands))
    elif command in ("-V", "--version"):
        echo(f"anlit {anlit.__version__}")
    elif command == "--print_completion":
        echo(_completion(" ".join(arguments) or "bash"))
    elif command in COMMANDS:
        in_main = threading.current_thread() is threading.main_thread()
        with preempted_by_signals() if command in ORDERLY and in_main else nullcontext():
            given = _import_modules([*arguments])
            make_torchmetrics_lazy()
            return (
                _module(command).main(
                    [command, *given] if command in (*LIGHTNING, *EVALUATIONS) else given
                )
                or 0
            )
    else:
        raise UserError(f"unknown command '{command}': choose one of {', '.join(COMMANDS)}")
    return 0


def _module(command: str) -> Any:
    return importlib.import_module(f"anlit.commands.{FILES.get(command, command)}")


def _completion(shell: str) -> str:
    """The script that teaches a shell the commands, the tools' options and the names of files; written by shtab."""
    try:
        import shtab
    except ImportError as error:
        raise UserError(
            f"--print_completion needs shtab: {install('completion', 'shtab')}"
        ) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(
            f"--print_completion {shell} is not known: choose one of {', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    program = argparse.ArgumentParser(prog="anlit")
    below = program.add_subparsers()
    for name, what in COMMANDS.items():
        if name in LIGHTNING:  # whose parser takes seconds to build
            parser = ToolParser()
            parser.add_argument("--config", metavar="FILE")
        else:
            parser = _module(name).parser(*([name] if name in EVALUATIONS else []))
        for action in vars(parser)["_actions"]:
            if action.metavar in NAMES_OF_FILES:
                action.complete = shtab.FILE
        below.add_parser(name, help=what.split(":")[0], parents=[parser], add_help=False)
    return str(shtab.complete(program, shell))


def _import_modules(arguments: list[str]) -> list[str]:
    """Import the modules of `--import MODULE`, so that their classes may be used; returns the other arguments."""
    parser = ToolParser(prog="anlit", add_help=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    options, others = parser.parse_known_args(arguments)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            fix = "give the dotted name of an installed module, or set PYTHONPATH to the folder that contains it"
            raise UserError(f"--import {module} fails ({error}): {fix}") from error
    return others


def _is_stdout_closed() -> bool:
    """Whether standard output has no reader any more, as after `| head`; if so, further output is discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _fail(sentence: str, exit_code: int) -> int:
    with suppress(OSError):  # nobody reads it
        echo(f"anlit: error: {sentence}", sys.stderr)
    discard_unwritable(sys.stderr)
    return exit_code
