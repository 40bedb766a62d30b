"""What the commands write to a user's terminal, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import fit_arguments

PROGRAM = """
import json, sys
from anlit.cli import main
for command in json.loads(sys.argv[1]):
    print(">", command[0], file=sys.stderr, flush=True)
    assert main(command) == 0
"""


def test_no_warning_of_a_library_reaches_the_terminal(shards: Path, tmp_path: Path) -> None:
    """A new run begun with `--ckpt_path last`, as the demo does, and continued; then what is done with it."""
    run_dir = tmp_path / "runs" / "run"
    ones = ("--trainer.limit_val_batches=1", "--trainer.val_check_interval=1")
    begun = fit_arguments(shards, run_dir, "--trainer.max_steps=4", *ones, "--ckpt_path=last", model="GPT")
    commands = [
        begun,
        [*begun, "--trainer.max_steps=6"],
        ["validate", f"--config={run_dir}/config.yaml"],
        ["compare", str(run_dir), "--output", str(tmp_path / "compared")],
        ["export", str(run_dir), "--output", str(tmp_path / "exported")],
    ]
    # deprecations too, which Python hides by default
    everything = {**os.environ, "PYTHONWARNINGS": "default"}
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, env=everything, check=False)
    assert done.returncode == 0, done.stderr
    noise = [line for line in done.stderr.splitlines() if "Continued with changed settings" not in line]
    assert noise == [f"> {command[0]}" for command in commands]
    assert f"validate: {run_dir}/checkpoints/best.ckpt" in done.stdout, "not the last one"
