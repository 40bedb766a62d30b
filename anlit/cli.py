"""The command `anlit`: LightningCLI's subcommands and the tools. `anlit --help` answers without importing torch."""

import importlib
import logging
import os
import select
import sys
from collections.abc import Callable

import anlit
from anlit.configuration import IMPORTED
from anlit.errors import RUN_FOLDER, UserError, unforeseen
from anlit.lazy_torchmetrics import make_torchmetrics_lazy
from anlit.options import CommandParser
from anlit.reporting.text import VisibleRecord, echo

COMMANDS = {
    "prepare": "a corpus into token shards: anlit prepare FineWeb --output data/fineweb",
    "fit": "train a model: anlit fit --config experiment/demo/gpt.yaml",
    "validate": "a checkpoint's loss: anlit validate --config RUN/config.yaml --ckpt_path RUN/checkpoints/best.ckpt",
    "test": "the same on the test split",
    "study": "arms tuned, trained on several seeds, reported: anlit study --config study/convergence.yaml",
    "benchmark": "speed: anlit benchmark step, attention",
    "size": "memory, FLOPs and days before starting: anlit size --config FILE --gpus 8",
    "compare": "plot and report of several runs: anlit compare RUN… --output DIR",
    "generate": "text from a checkpoint: anlit generate RUN 'Once upon a time'",
    "score": "log-likelihoods of texts, per token: anlit score RUN FILE… --output scores.parquet",
    "export": "a model out of its run, for anlit or transformers: anlit export RUN --output DIR",
    "import": "a Qwen3, Llama and others of transformers as GPT+: anlit import FOLDER --output DIR",
    "lengths": "loss at 1, 4 and 16 times the training length: anlit lengths RUN… --output DIR",
    "needle": "needle in a haystack, depth × length: anlit needle RUN… --output DIR",
    "diagnose": "attention statistics by layer, head and context length: anlit diagnose RUN --output DIR",
}
LIGHTNING = ("fit", "validate", "test")
"""Subcommands of LightningCLI, in commands/fit.py; each other one has a file of its name."""


def usage() -> str:
    """The overview that `anlit` and `anlit --help` print."""
    commands = "\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())
    return (
        f"anlit {anlit.__version__}: train and compare GPT+, nGPT and anGPT\n\n"
        f"usage: anlit COMMAND [OPTIONS]\n\ncommands:\n{commands}\n\n"
        "anlit COMMAND --help lists the options of one command; anlit fit --print_config prints the resolved YAML;\n"
        "anlit fit --model.help AnGPT and --data.help PythonSources explain one class's settings.\n"
        "anlit --print_completion bash prints the completion of commands and files for a shell (bash, zsh, tcsh).\n"
        "Every command takes --import MODULE, for a model, a mechanism or data of your own that a checkpoint names.\n"
    )


_FILES = {"import": "import_model"}  # import is a word of Python's own


def _entry(command: str) -> Callable[[list[str]], int]:
    """The function behind a command, imported only now."""
    make_torchmetrics_lazy()
    if command in LIGHTNING:
        fit = importlib.import_module("anlit.commands.fit")
        return lambda arguments: fit.main([command, *arguments])
    return importlib.import_module(f"anlit.commands.{_FILES.get(command, command)}").main


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (without the program's name) and return the exit code.

    0: done. 1: the run failed or was interrupted. 2: the user's command, configuration or data is wrong; one
    sentence on standard error says what. 75: the run was preempted (SIGTERM, SIGUSR1), its checkpoint is written.
    130: a tool was interrupted by Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        echo(f"anlit {anlit.__version__}")
        return 0
    if arguments[0] == "--print_completion":
        return _print_completion(arguments[1:])
    if arguments[0] not in COMMANDS:
        return _fail(f"unknown command '{arguments[0]}': choose one of {', '.join(COMMANDS)}")
    logging.setLogRecordFactory(VisibleRecord)
    RUN_FOLDER.set("")
    try:
        code = _entry(arguments[0])(_import_modules(arguments[1:])) or 0
        sys.stdout.flush()  # otherwise Python notices at its end, and complains, that nobody reads
        return code
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError as error:
        return 1 if _is_stdout_closed() else _fail(unforeseen(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        return _fail(unforeseen(error), 1)


def _print_completion(arguments: list[str]) -> int:
    from anlit.commands.support.completion import completion  # rarely needed

    try:
        echo(completion(" ".join(arguments) or "bash", COMMANDS))
    except UserError as error:
        return _fail(str(error))
    return 0


def _import_modules(arguments: list[str]) -> list[str]:
    """Import the modules of `--import MODULE`, so that their classes may be used; returns the other arguments.

    Raises:
        UserError: There is no such module.
    """
    parser = CommandParser(prog="anlit", add_help=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    options, others = parser.parse_known_args(arguments)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"--import {module} fails ({error}): give the dotted name of an installed module, or set PYTHONPATH to "
                "the folder that contains it"
            ) from error
    IMPORTED[:] = options.modules
    return others


def _is_stdout_closed() -> bool:
    """Whether standard output has no reader any more, as after `| head`; if so, further output is discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _fail(sentence: str, exit_code: int = UserError.exit_code) -> int:
    echo(f"anlit: error: {sentence}", sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
