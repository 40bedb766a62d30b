"""Lightning's private members: all in one file, and each still there."""

import ast
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ddp
from lightning.pytorch.trainer import call

import anlit
from anlit.training import lightning_internals
from anlit.training.lightning_internals import wrap_on_current_stream
from tests.data.modules import quiet_trainer

PACKAGE = Path(anlit.__file__).parent
HOME = Path(lightning_internals.__file__)
TORCH = {"_dynamo", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
ALLOWED = {"_replace", "_asdict", "_fields"} | TORCH


@pytest.fixture(scope="module")
def owners() -> list[Any]:
    """One of each thing whose private members are used."""
    trainer = quiet_trainer()
    loop = trainer.fit_loop
    return [trainer, loop, loop.epoch_loop, trainer.strategy, L.LightningModule(), ModelCheckpoint(), call,
            ModelParallelStrategy(), DDPStrategy(), LightningCLI]  # fmt: skip


def test_every_private_member_that_is_used_exists(owners: list[Any]) -> None:
    tree = ast.parse(HOME.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr)
    }
    overridden = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and is_private(node.name)
    }
    assert len(used | overridden) > 15
    assert {
        name for name in used | overridden if not any(hasattr(owner, name) for owner in owners)
    } == set()


@pytest.fixture(scope="module")
def sources() -> str:
    """Lightning's own."""
    return "\n".join(path.read_text() for path in sorted(Path(L.__file__).parent.rglob("*.py")))


def test_the_hooks_that_are_replaced_are_called_by_lightning(sources: str) -> None:
    """A name that stays but that nothing calls would let a replaced hook do nothing."""
    for call_of in (
        "self._should_check_val_fx(data_fetcher)", "self._broadcast_sigterm_tensor()", "self._parse_ckpt_path()",
        "data_fetcher._start_profiler = self._on_before_fetch", "data_fetcher._stop_profiler = self._on_after_fetch",
        "self._run_subcommand(self.subcommand)", 'hparams["_instantiator"] = ',
    ):  # fmt: skip
        assert call_of in sources, call_of


def test_nothing_else_uses_private_members_of_lightning(sources: str) -> None:
    known = set(re.findall(r"(?:def |class |\.)(_[a-z]\w*|_[A-Z]\w*)", sources)) - ALLOWED
    uses = {
        path.name: foreign(ast.parse(path.read_text())) & known
        for path in {*PACKAGE.rglob("*.py")} - {HOME}
    }
    assert {name: names for name, names in uses.items() if names} == {}, (
        "move these into lightning_internals.py"
    )


def test_ddp_makes_its_gradient_nodes_on_the_stream_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes made on another stream let every step wait for it. The GPU is pretended."""
    wrapped: list[tuple[Any, dict[str, Any]]] = []
    streams: list[Any] = []

    def wrap(module: Any, **settings: Any) -> None:
        wrapped.append((module, settings))

    for home in (ddp, lightning_internals):
        monkeypatch.setattr(home, "DistributedDataParallel", wrap)
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


def foreign(tree: ast.AST) -> set[str]:
    """Private names that a file imports from Lightning, or that it uses without defining them itself."""
    own, used, imported = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            sets_own = (
                isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            )
            (own if sets_own else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
            imported |= {alias.name for alias in node.names}
    return {name for name in imported | (used - own) if is_private(name)}
