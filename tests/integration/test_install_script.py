"""docker/install.sh: extras leave torch alone and torchvision out, at every moment; with a stand-in for pip."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!{sys.executable}
import json, os, sys
arguments, log = sys.argv[1:], os.environ["PIP_LOG"]
if arguments[:2] == ["-m", "pip"]:
    if "--dry-run" in arguments:
        with open(arguments[arguments.index("--report") + 1], "w") as report:
            report.write(os.environ["PIP_REPORT"])
    else:
        asked = [open(a).read().split() if a.endswith(".txt") else a for a in arguments[2:]]
        open(log, "a").write(json.dumps(asked) + "\\n")
elif arguments[:1] == ["-"]:  # the script on standard input
    sys.argv = arguments
    exec(compile(sys.stdin.read(), "install.sh", "exec"))
elif "print(" in arguments[1]:
    print("torch==2.13.0+cpu")
"""


def install(tmp_path: Path, *packages: str) -> tuple[subprocess.CompletedProcess[str], list[list]]:
    """Run the script where pip would install `packages`; its end, and what pip was really asked to do."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "pip.log"
    log.touch()
    report = {"install": [{"metadata": dict(zip(("name", "version"), p.split("=="), strict=True))} for p in packages]}
    given = {"PYTHON": sys.executable, "VENV": str(tmp_path / "venv"), "PIP_LOG": str(log)}
    done = subprocess.run(
        ["sh", str(ROOT / "docker" / "install.sh"), "eval"],
        env=os.environ | given | {"PIP_REPORT": json.dumps(report)}, capture_output=True, text=True,
    )  # fmt: skip
    return done, [json.loads(line) for line in log.read_text().splitlines()]


def test_all_but_torchvision_is_installed(tmp_path: Path) -> None:
    done, asked = install(tmp_path, "sacrebleu==2.5.1", "torchvision==0.28.0", "litdata==0.2.76", "anlit==0.1.0")
    assert done.returncode == 0, done.stderr
    assert not any("torchvision" in str(call) or "uninstall" in str(call) for call in asked)
    first, last = asked
    assert first[-1] == ["sacrebleu==2.5.1", "litdata==0.2.76"]
    assert "--no-deps" in first
    assert last[-3:] == ["--no-deps", "-e", "."]


@pytest.mark.parametrize("version", ["2.14.0", "2.13.0+cu129"])
def test_another_torch_is_refused(tmp_path: Path, version: str) -> None:
    done, asked = install(tmp_path, "lm_eval==0.4.10", f"torch=={version}")
    assert done.returncode != 0
    assert f"pip would replace torch by {version}" in done.stderr
    assert asked == []
