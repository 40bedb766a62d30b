"""Whether an optional package is installed."""

from pathlib import Path

import pytest

from anlit.packages import is_installed


def test_a_folder_of_the_name_is_no_package(tmp_path: Path, monkeypatch) -> None:
    """W&B writes its runs into `wandb`, and a user may have kernels in `triton`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("notes_of_runs", "library_of_runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "library_of_runs" / "__init__.py").touch()

    assert is_installed("library_of_runs")
    assert not is_installed("notes_of_runs")
    assert not is_installed("nowhere")


@pytest.mark.parametrize("package", ["torch", "yaml"])
def test_packages_of_anlit_are_installed(package: str) -> None:
    assert is_installed(package)
