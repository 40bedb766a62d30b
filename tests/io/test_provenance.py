"""What a result says of the code behind it."""

import subprocess
from pathlib import Path

import pytest

from anlit.io import provenance
from anlit.io.provenance import git_state


def test_commit_and_changes_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "__init__.py"
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    assert git_state() is None
    package.write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert git_state() is None  # a checkout, but not of this file
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    state = git_state()
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, True)
