"""What the commands write to a user's terminal, as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import fit_arguments

EVERY = {**os.environ, "PYTHONWARNINGS": "default"}
"""Deprecations too, which Python hides by default."""


def anlit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anlit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=EVERY, check=False)


def test_no_warning_of_a_library_reaches_the_terminal(shards: Path, tmp_path: Path) -> None:
    """A new run begun with `--ckpt_path last`, as the demo does, and continued; then what is done with it."""
    run_dir = tmp_path / "runs" / "run"
    begun = fit_arguments(shards, run_dir, "--trainer.max_steps=4", "--ckpt_path=last", model="GPT")
    config = f"--config={run_dir}/config.yaml"
    after = [
        ["validate", config],
        ["compare", str(run_dir), "--output", str(tmp_path / "compared")],
        ["export", str(run_dir), "--output", str(tmp_path / "exported")],
    ]
    for arguments in (begun, [*begun, "--trainer.max_steps=6"], *after):
        result = anlit(*arguments)
        assert result.returncode == 0, result.stderr
        noise = [line for line in result.stderr.splitlines() if "Continued with changed settings" not in line]
        assert noise == [], arguments[0]
        if arguments[0] == "validate":
            assert result.stdout.startswith(f"validate: {run_dir}/checkpoints/best.ckpt"), "not the last one"
