"""`anlit demo`: trains and compares the three architectures on this machine's Python sources."""

import subprocess
import sys
from pathlib import Path

from anlit.config.options import ToolParser
from anlit.reporting.text import say
from anlit.runs.folders import read_run_record

ARMS = ("gpt", "ngpt", "angpt", "angpt-scale-invariant")
"""Files in `configs/experiment/demo`; each is a run folder too."""
COMMON = "experiment/demo/common.yaml"


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit demo",
        description="Trains GPT+, nGPT, anGPT, and anGPT with scale-invariant attention, on the "
        "Python sources of this machine, and compares them: about ten minutes on two CPU cores. "
        "The same command goes on where it was ended.",
    )
    parser.add_argument(
        "--output",
        default="runs/demo",
        metavar="DIR",
        help="folder for the runs and the report (runs/demo)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Train the arms that have not finished, then compare. Return the first exit code but 0."""
    output = Path(parser().parse_args(argv).output)
    for arm in ARMS:
        if is_finished(output / arm):
            continue
        say(f"training {arm}")
        exit_code = anlit(*fit_arguments(arm, output / arm))
        if exit_code != 0:
            return exit_code
    runs = [str(output / arm) for arm in ARMS]
    return anlit("compare", *runs, "--output", str(output / "comparison"), "--measure_steps")


def fit_arguments(arm: str, run_dir: Path) -> list[str]:
    """The command that begins an arm's run, or goes on with it."""
    own_file = f"experiment/demo/{arm}.yaml"
    files = ["--config", own_file, "--config", COMMON]
    continuation = ["--ckpt_path", "last"] if run_dir.exists() else []
    return ["fit", *files, "--run_dir", str(run_dir), *continuation]


def is_finished(run_dir: Path) -> bool:
    return read_run_record(run_dir).get("status") == "finished"


def anlit(*arguments: str) -> int:
    """Run a command of anlit in a process of its own, and return its exit code."""
    return subprocess.run([sys.executable, "-m", "anlit", *arguments]).returncode
