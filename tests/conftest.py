"""Settings of every test: threads, the processor that libraries see, the random seed."""

import contextlib
import importlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

# Before torch starts. Test processes share the cores, so each has one thread by default.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch follows the variable, but oneDNN would still use AVX-512.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import numpy as np
import pytest
import torch
import yaml

from tests.covering import covering

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Under `nohup`, and in the background of a script, signals are ignored, and child processes would
# inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# `make test` gives its flags to every make below it. A test calls make as from a shell.
for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(variable, None)

if not torch.cuda.is_available():
    # At its import Triton chooses interpreter or compiler, and several libraries import it.
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
        importlib.import_module("triton")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments) → the error message of `anlit`, which exits with code 2."""
    from anlit.cli import main

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        output = capsys.readouterr().err
        assert "Traceback" not in output
        (error,) = (line for line in output.splitlines() if line.startswith("anlit: error: "))
        return error

    return run


@pytest.fixture
def printed_config(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """printed_config(*options) → the configuration that `anlit fit` reads from them."""
    from anlit.cli import main

    def run(*options: str) -> Any:
        with pytest.raises(SystemExit, match=r"^(0|None)?$"):
            main(["fit", *options, "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed all random numbers before every test and its fixtures, whatever the order of tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a CUDA device, and apply the marker `covering`."""
    cases_by_function: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            function = item.nodeid.split("[")[0]
            cases_by_function.setdefault(function, []).append(item)
    for cases in cases_by_function.values():
        mark_uncovered(cases)


def mark_uncovered(cases: list[Any]) -> None:
    """Mark the cases of a test as slow, except a covering subset."""
    (strength,) = cases[0].get_closest_marker("covering").args
    rows = []
    for case in cases:
        rows.append([repr(value) for value in case.callspec.params.values()])
    fast = covering(rows, strength)
    for index, case in enumerate(cases):
        if index not in fast:
            case.add_marker(pytest.mark.slow)
