"""Every YAML fragment in configs/attention/ builds a model that computes, and no shipped mechanism is without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import anlit
from anlit.attention import mechanisms
from tests.models.tiny import ARCHITECTURES, random_tokens, tiny

FRAGMENTS = {
    path.stem: yaml.safe_load(path.read_text())["model"]["init_args"]
    for path in (Path(__file__).parents[2] / "configs" / "attention").glob("*.yaml")
}


def instance(described: Any) -> Any:
    """The object that a class_path with init_args describes; arguments described so are made first."""
    if isinstance(described, list):
        return [instance(entry) for entry in described]
    if not isinstance(described, dict):
        return described
    arguments = {key: instance(value) for key, value in described.get("init_args", {}).items()}
    return getattr(anlit, described["class_path"].removeprefix("anlit."))(**arguments)


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_fragment_builds_a_model(architecture, name) -> None:
    parts = {key: instance(described) for key, described in FRAGMENTS[name].items()}
    model = tiny(architecture, **parts)
    logits = model(random_tokens(2, 12), torch.tensor([[0] * 5 + [1] * 7] * 2))
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    given = parts["attention"]
    given = given.layers[1] if isinstance(given, anlit.AttentionPattern) else given
    assert type(model.model.blocks[1].attention.mechanism) is type(given)


def test_every_mechanism_has_a_fragment() -> None:
    shared = {fragment["attention"]["class_path"] for fragment in FRAGMENTS.values()}
    assert shared == {f"anlit.{name}" for name in mechanisms.__all__}
