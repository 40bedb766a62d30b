"""Lightning's private members: all in one file, and each still there."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer import call

import anlit

PACKAGE = Path(anlit.__file__).parent
HOME = PACKAGE / "lightning_internals.py"
ALLOWED = {"_replace", "_asdict", "_fields", "_dynamo", "_parameters", "_buffers"}  # of NamedTuple and torch


@pytest.fixture(scope="module")
def owners() -> list[Any]:
    """One of each thing whose private members are used."""
    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    loop = trainer.fit_loop
    things = [trainer, loop, loop.epoch_loop, trainer.strategy, L.LightningModule(), ModelCheckpoint(), call]
    return [*things, ModelParallelStrategy(), LightningCLI]


def test_every_private_member_that_is_used_exists(owners: list[Any]) -> None:
    tree = ast.parse(HOME.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    overridden = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_private(node.name)}
    assert len(used | overridden) > 20
    missing = {name for name in used | overridden if not any(hasattr(owner, name) for owner in owners)}
    assert not missing, f"this version of Lightning has no {', '.join(sorted(missing))}"


def test_the_hooks_that_are_replaced_are_called_by_lightning() -> None:
    """A name that stays but that nothing calls would let a replaced hook do nothing."""
    sources = lightning_sources()
    for call_of in (
        "self._should_check_val_fx(data_fetcher)",
        "data_fetcher._start_profiler = self._on_before_fetch",
        "data_fetcher._stop_profiler = self._on_after_fetch",
        "self._broadcast_sigterm_tensor()",
        "self._run_subcommand(self.subcommand)",
        "self._parse_ckpt_path()",
        'hparams["_instantiator"] = ',
    ):
        assert call_of in sources, call_of


def test_nothing_else_uses_private_members_of_lightning() -> None:
    known = names_of_lightning()
    actual = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != HOME:
            actual += [f"{path.relative_to(PACKAGE)}: {name}" for name in foreign(ast.parse(path.read_text()), known)]
    assert not actual, "move these into anlit/lightning_internals.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def foreign(tree: ast.AST, known: set[str]) -> list[str]:
    """Private names of Lightning that a file imports, or that it uses without defining them itself."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_set_on_self(node)}
    from_lightning = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning")
    ]
    imported = [alias.name for node in from_lightning for alias in node.names]
    used = [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr not in own | ALLOWED]
    return [name for name in [*imported, *used] if is_private(name) and name in known]


def is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def lightning_sources() -> str:
    spec = find_spec("lightning")
    assert spec is not None
    assert spec.origin is not None
    return "\n".join(path.read_text() for path in sorted(Path(spec.origin).parent.rglob("*.py")))


def names_of_lightning() -> set[str]:
    """What Lightning calls its private functions, classes and attributes."""

    return set(re.findall(r"(?:def |class |\.)(_[a-z]\w*|_[A-Z]\w*)", lightning_sources()))
