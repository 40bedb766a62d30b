"""The command `anlit`: LightningCLI's subcommands and the tools.

`anlit --help` answers without importing torch.
"""

import importlib
import locale
import logging
import os
import select
import sys
import threading
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from typing import Any, TextIO

import anlit
from anlit.commands import COMMANDS, EVALUATIONS, FILES, LIGHTNING
from anlit.commands.garbage_collection import collector_paused
from anlit.config.options import ToolParser
from anlit.error_origins import message_of
from anlit.errors import (
    INTERRUPTED,
    PREEMPTED,
    RUN_FOLDER,
    Preempted,
    UserError,
    disk_error,
    encoding_error,
    report_unforeseen,
    tokenizer_panics_as_errors,
)
from anlit.reporting.text import VisibleRecord, discard_unwritable, echo
from anlit.signals import preempted_by_signals
from anlit.training.lazy_torchmetrics import make_torchmetrics_lazy

RESTARTABLE = (*LIGHTNING, "study", "prepare")
"""Commands that a signal ends in order, so that they can be started again."""
NAMING_CLASSES = (*LIGHTNING, "size", "study")
"""Commands whose arguments are a configuration, which may name classes of any module."""
USAGE = """\
anlit {version}: train and compare GPT+, nGPT and anGPT

usage: anlit COMMAND [OPTIONS]

commands:
{commands}

anlit COMMAND --help lists the options of one command; anlit fit --print_config
prints the resolved YAML, --model.help AnGPT and --data.help TextFiles explain
one class's settings. Every command takes --import MODULE, for a model, a
mechanism or data of your own that a checkpoint names.
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a locale may lack ±, √ and names
    arguments = sys.argv[1:] if argv is None else argv
    try:
        try:
            with tokenizer_panics_as_errors():
                return _run(*arguments or ["--help"])
        finally:
            sys.stdout.flush()  # a broken pipe is noticed here, not when Python exits
    except UserError as error:
        return _fail(message_of(error), error.exit_code)
    except Preempted:
        fix = "start it again, fit with --ckpt_path last where it has a checkpoint"
        return _fail(f"ended by a signal: {fix}", PREEMPTED)
    except BrokenPipeError as error:
        return 1 if _discard_output_without_reader() else _fail(report_unforeseen(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        wrong_encoding = encoding_error(error)
        if wrong_encoding is not None:
            return _fail(str(wrong_encoding), wrong_encoding.exit_code)
        return _fail(str(disk_error(error) or report_unforeseen(error)), 1)


def _run(command: str, *arguments: str) -> int:
    """Run a command, or print the help or the version; return the exit code."""
    if command in COMMANDS:
        return _run_command(command, list(arguments))
    if command in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
        echo(USAGE.format(version=anlit.__version__, commands=commands))
    elif command in ("-V", "--version"):
        echo(f"anlit {anlit.__version__}")
    else:
        raise UserError(f"unknown command '{command}': choose one of {', '.join(COMMANDS)}")
    return 0


def _run_command(command: str, arguments: list[str]) -> int:
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_restartable = command in RESTARTABLE and is_main_thread
    with preempted_by_signals() if is_restartable else nullcontext():
        if command in NAMING_CLASSES:
            _refuse_undecoded(arguments)
        if command in NAMING_CLASSES or any(text.startswith("--import") for text in arguments):
            sys.path.append(os.getcwd())  # last, so installed packages have precedence
        make_torchmetrics_lazy()
        with collector_paused():
            arguments = _import_modules(arguments)
            module: Any = importlib.import_module(f"anlit.commands.{FILES.get(command, command)}")
        if command in (*LIGHTNING, *EVALUATIONS):  # files with several commands
            arguments = [command, *arguments]
        return module.main(arguments) or 0


def _refuse_undecoded(arguments: list[str]) -> None:
    """Raise UserError for an argument that is no text: it could not be written to config.yaml.

    Python stands surrogates for bytes that the system's encoding lacks.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            fix = "choose another name"
            with suppress(UnicodeDecodeError):
                os.fsencode(argument).decode()
                fix = f"this system's encoding is {locale.getencoding()}, set PYTHONUTF8=1"
            raise UserError(
                f"{argument} is not valid UTF-8, which config.yaml is written in: {fix}"
            ) from error


def _import_modules(arguments: list[str]) -> list[str]:
    """Import the modules of `--import MODULE`, and return the further arguments."""
    parser = ToolParser(prog="anlit", add_help=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    options, further_arguments = parser.parse_known_args(arguments)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever the user's file raises
            fix = "correct the module"
            if not _is_found(module, error):
                fix = (
                    "give the dotted name of an installed module, or of a file in this folder or "
                    "PYTHONPATH"
                )
            cause = f"{type(error).__name__}: {error}"
            raise UserError(f"--import {module} fails ({cause}): {fix}") from error
    return further_arguments


def _is_found(module: str, error: BaseException) -> bool:
    """Whether importing a module failed with `error` in its code, and not for its name."""
    if not all(name.isidentifier() for name in module.split(".")):
        return False
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing is None or not f"{module}.".startswith(f"{missing}.")


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
