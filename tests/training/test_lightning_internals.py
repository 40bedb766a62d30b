"""All uses of Lightning's private members are in one file, and the members exist."""

import ast
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ddp
from lightning.pytorch.trainer import call

import anlit
from anlit.training import lightning_internals
from anlit.training.lightning_internals import wrap_on_current_stream
from tests.data.modules import quiet_trainer

PACKAGE = Path(anlit.__file__).parent
INTERNALS = Path(lightning_internals.__file__)
TORCH = {"_dynamo", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
"""Private members of torch, some also in Lightning."""
NAMED_TUPLE = {"_replace", "_asdict", "_fields"}
REPLACED_HOOKS = (
    "self._should_check_val_fx(data_fetcher)",
    "self._broadcast_sigterm_tensor()",
    "self._parse_ckpt_path()",
    "data_fetcher._start_profiler = self._on_before_fetch",
    "data_fetcher._stop_profiler = self._on_after_fetch",
    "self._run_subcommand(self.subcommand)",
    'hparams["_instantiator"] = ',
)
"""The lines of Lightning that call the members which anlit replaces."""


@pytest.fixture(scope="module")
def owners() -> list[Any]:
    """Objects with the private members that anlit uses."""
    trainer = quiet_trainer()
    loop = trainer.fit_loop
    return [
        trainer,
        loop,
        loop.epoch_loop,
        trainer.strategy,
        L.LightningModule(),
        ModelCheckpoint(),
        WeightAveraging(),
        call,
        ModelParallelStrategy(),
        DDPStrategy(),
        LightningCLI,
    ]


def test_every_private_member_that_is_used_exists(owners: list[Any]) -> None:
    members = set()
    for node in ast.walk(ast.parse(INTERNALS.read_text())):
        if isinstance(node, ast.Attribute):
            members.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            members.add(node.name)
    members = set(filter(is_private, members))

    assert len(members) > 15
    for name in members:
        assert any(hasattr(owner, name) for owner in owners), name


@pytest.fixture(scope="module")
def sources() -> str:
    """The source of Lightning."""
    return "\n".join(path.read_text() for path in sorted(Path(L.__file__).parent.rglob("*.py")))


def test_the_hooks_that_are_replaced_are_called_by_lightning(sources: str) -> None:
    """A name that stays but that nothing calls would let a replaced hook do nothing."""
    for line in REPLACED_HOOKS:
        assert line in sources, line


def test_nothing_else_uses_private_members_of_lightning(sources: str) -> None:
    members = set(re.findall(r"(?:def |class |\.)(_[a-z]\w*|_[A-Z]\w*)", sources))
    members -= TORCH | NAMED_TUPLE

    for path in {*PACKAGE.rglob("*.py")} - {INTERNALS}:
        misplaced = foreign_private_names(ast.parse(path.read_text())) & members
        assert not misplaced, f"move {misplaced} of {path.name} into lightning_internals.py"


def test_ddp_makes_its_gradient_nodes_on_the_stream_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step would wait for nodes on another stream. The GPU is simulated."""
    wrapped: list[tuple[Any, dict[str, Any]]] = []
    streams: list[Any] = []

    def wrap(module: Any, **settings: Any) -> None:
        wrapped.append((module, settings))

    for module in (ddp, lightning_internals):
        monkeypatch.setattr(module, "DistributedDataParallel", wrap)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: streams.append(s) or nullcontext())
    strategy = DDPStrategy(
        parallel_devices=[torch.device("cuda", 0)], static_graph=True, process_group_backend="gloo"
    )
    strategy.cluster_environment = LightningEnvironment()
    strategy.model = module = L.LightningModule()
    monkeypatch.setattr(strategy, "_register_ddp_hooks", lambda: None)

    wrap_on_current_stream(strategy)
    strategy.configure_ddp()

    assert wrapped == [(module, {"device_ids": [0], "static_graph": True})]
    assert streams == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def foreign_private_names(tree: ast.AST) -> set[str]:
    """Private names that a file imports from Lightning, or uses without a definition."""
    defined: set[str] = set()
    accessed: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute):
            names = defined if is_set_on_self(node) else accessed
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
            imported.update(alias.name for alias in node.names)
    return set(filter(is_private, imported | (accessed - defined)))


def is_set_on_self(node: ast.Attribute) -> bool:
    is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_of_self and isinstance(node.ctx, ast.Store)
