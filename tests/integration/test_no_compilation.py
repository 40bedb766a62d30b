"""A tool compiles nothing for a single use. A large evaluation does, because it saves time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit import ALiBi, AnGPT, LogBias, Plain, ScaleInvariant, SlidingWindow
from anlit.cli import main
from anlit.nn.attention import attention
from anlit.nn.kernels import default_kernel
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models import runtime
from tests.data.modules import quiet_trainer
from tests.integration.conftest import Train
from tests.nn.models.tiny import batches, tiny

SMALL = ("--trainer.max_steps=2", "--data.val_blocks=4", "--trainer.limit_val_batches=1.0")
COMPILED = {"triton", "flex"}
MECHANISMS = [Plain(), ScaleInvariant(), LogBias(), ALiBi(), SlidingWindow(8)]


class Compilations:
    """The functions that were compiled, and the kernels that a GPU would have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.functions: list[Any] = []
        self.gpu_kernels: set[str] = set()
        monkeypatch.setattr(torch, "compile", self._compile)
        monkeypatch.setattr(attention, "default_kernel", self._choose)

    def _compile(self, function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        self.functions.append(function)
        return function

    def _choose(
        self, mechanism: Mechanism, device: str, is_packed: bool, q: Any, *settings: Any
    ) -> str:
        self.gpu_kernels.add(default_kernel(mechanism, "cuda", is_packed, None, *settings))
        return default_kernel(mechanism, device, is_packed, q, *settings)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    return Compilations(monkeypatch)


@pytest.fixture
def all_repays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these models and texts were large."""
    monkeypatch.setattr(runtime, "FLOPS_THAT_REPAY", 1)
    monkeypatch.setattr(runtime, "LOGITS_THAT_REPAY", 1)


@pytest.fixture(scope="module")
def scale_invariant(trained: Train) -> Path:
    return trained("--model.attention=ScaleInvariant", *SMALL)


def arguments_of(tool: str, run: Path, folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("def main():\n    return 1\n" * 8)
    output = f"--output={folder / 'out'}"
    options = {
        "validate": ["--model.runtime.compile=true"],
        "lengths": [output, "--lengths=32,64"],
        "generate": ["def", "--max_tokens=3"],
        "score": [str(text), f"--output={folder / 'scores.parquet'}"],
        "diagnose": [output, "--lengths=32"],
    }
    return [tool, str(run), *options[tool]]


@pytest.mark.parametrize("tool", ["validate", "lengths", "generate", "score", "diagnose"])
def test_a_tool_compiles_nothing(
    scale_invariant: Path, tmp_path: Path, compilations: Compilations, tool: str
) -> None:
    """The run compiles its blocks, and a GPU would compile its kernels."""
    assert main(arguments_of(tool, scale_invariant, tmp_path)) == 0

    assert compilations.functions == []
    assert compilations.gpu_kernels == {"eager"}


@pytest.mark.usefixtures("all_repays")
@pytest.mark.parametrize("tool", ["validate", "lengths", "score"])
def test_a_large_evaluation_takes_compiled_kernels(
    scale_invariant: Path, tmp_path: Path, compilations: Compilations, tool: str
) -> None:
    assert main(arguments_of(tool, scale_invariant, tmp_path)) == 0

    n_blocks = 2 if tool == "validate" else 0
    assert compilations.gpu_kernels <= COMPILED
    assert compilations.gpu_kernels
    assert len(compilations.functions) == n_blocks


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: type(mechanism).__name__)
def test_a_gpu_has_a_kernel_without_compilation_for_every_mechanism(
    mechanism: Mechanism, is_packed: bool
) -> None:
    kernel = default_kernel(mechanism, "cuda", is_packed, may_compile=False)

    assert kernel not in COMPILED


def test_training_after_a_validation_is_compiled(compilations: Compilations) -> None:
    """A validation after training keeps what is compiled."""
    model = tiny(AnGPT, runtime=runtime.Runtime(compile=True))
    n_blocks = len(model.model.blocks)
    loader = batches(8, model.context_length)

    trainer = quiet_trainer(limit_val_batches=1, inference_mode=False)
    trainer.validate(model, loader, verbose=False)
    assert compilations.functions == []

    trainer = quiet_trainer(max_steps=1, limit_val_batches=1)
    trainer.fit(model, loader, loader)
    assert len(compilations.functions) == n_blocks

    trainer = quiet_trainer(limit_val_batches=1)
    trainer.validate(model, loader, verbose=False)
    assert len(compilations.functions) == n_blocks
