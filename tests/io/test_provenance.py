"""The commit of the code behind a result."""

import subprocess
from pathlib import Path

import pytest

from anlit.io import provenance
from anlit.io.provenance import git_state

IDENTITY = ["-c", "user.name=a", "-c", "user.email=b"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package's."""
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "PACKAGE_FOLDER", tmp_path)
    return tmp_path


def run_git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, check=True)


def make_repository(folder: Path) -> None:
    run_git(folder, "init", "-q")
    run_git(folder, "commit", "-q", "--allow-empty", "-m", "x")


def test_a_package_outside_a_checkout_has_no_commit(package: Path) -> None:
    assert git_state() is None


def test_the_commit_of_another_project_s_checkout_is_not_used(package: Path) -> None:
    make_repository(package)

    assert git_state() is None


def test_the_commit_of_a_checkout_tells_whether_a_tracked_file_differs(package: Path) -> None:
    make_repository(package)
    run_git(package, "add", ".")

    state = git_state()

    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is True
