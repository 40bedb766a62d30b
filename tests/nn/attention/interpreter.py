"""Triton's interpreter, which runs our kernels on a CPU."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def use_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run Triton's kernels, or skip the test where it cannot."""
    pytest.importorskip("triton")
    is_old = Version(version("triton")) < Version("3.7")
    if is_old and Version(version("numpy")) >= Version("2.5"):
        pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.5")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
