"""What is the same for every test: threads, the processor that libraries see, and random numbers at its start."""

import contextlib
import importlib
import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

# Set before torch starts. Tests run beside each other, so each process has one thread unless the user says more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks oneDNN, which looks at the processor itself, whether it may pack matrices for AVX-512.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import numpy as np
import pytest
import torch
import yaml

from tests.covering import covering

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Under `nohup` it is ignored, and what a test starts would ignore it too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# `make test` hands its own flags to every make below it; a test calls make as from a shell.
for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(variable, None)

if not torch.cuda.is_available():
    # Triton is the interpreter's or the compiler's from its import on, and several libraries import it.
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
        importlib.import_module("triton")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments) → the one sentence with which `anlit` refuses them; its exit code is 2."""
    from anlit.cli import main

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        (error,) = (line for line in said.splitlines() if line.startswith("anlit: error: "))
        return error

    return run


@pytest.fixture
def printed_config(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """printed_config(*options) → the configuration that `anlit fit` takes from them."""
    from anlit.cli import main

    def run(*options: str) -> Any:
        with pytest.raises(SystemExit, match=r"^(0|None)?$"):
            main(["fit", *options, "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test, and the fixtures that it is first to ask for, with the same random numbers in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip themselves where there is no CUDA device; `covering` marks what is left out as slow."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    fast = [
        item
        for item in items
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow")
    ]
    for _, group in itertools.groupby(sorted(fast, key=function), function):
        product = list(group)
        (strength,) = product[0].get_closest_marker("covering").args
        kept = covering(
            [[repr(value) for value in item.callspec.params.values()] for item in product], strength
        )
        for index in set(range(len(product))) - kept:
            product[index].add_marker(pytest.mark.slow)
