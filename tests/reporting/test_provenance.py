"""What a result says of the code behind it."""

import subprocess
from pathlib import Path

import pytest

import anlit
from anlit.reporting.provenance import git_state, versions


def repository(folder: Path) -> None:
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)


def test_commit_and_changes_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "__init__.py"
    monkeypatch.setattr(anlit, "__file__", str(package))
    assert git_state() is None
    package.write_text("")
    repository(tmp_path)
    assert git_state() is None  # a checkout, but not of this file
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    changed = git_state()
    assert changed is not None
    assert (len(changed["commit"]), changed["dirty"]) == (40, True)


def test_versions_leave_out_what_is_not_installed() -> None:
    assert {"python", "torch", "lightning", "litdata"} <= versions().keys()
    assert all(versions().values())


def test_the_kernels_packages_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, version in (("flash-attn-4", "4.0.0b36"), ("nvidia-cutlass-dsl", "4.4.2")):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        assert versions()[name] == version
