"""Every YAML fragment in configs/attention/ builds a model that computes, and no shipped mechanism is without one."""

from pathlib import Path

import pytest
import torch
import yaml

from anlit.config.objects import build_from_plain
from anlit.nn import mechanisms
from tests.nn.models.tiny import ARCHITECTURES, SIZE, random_tokens

PATHS = (Path(__file__).parents[3] / "configs" / "attention").glob("*.yaml")
FRAGMENTS = {path.stem: yaml.safe_load(path.read_text())["model"]["init_args"] for path in PATHS}


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.covering(1)
def test_every_fragment_builds_a_model(architecture, name) -> None:
    model = build_from_plain(architecture, {**SIZE, **FRAGMENTS[name]}, name)
    logits = model(random_tokens(2, 12), torch.tensor([[0] * 5 + [1] * 7] * 2))
    logits.square().sum().backward()
    assert all(
        x.isfinite().all() for x in (logits, *(parameter.grad for parameter in model.parameters()))
    )


def test_every_mechanism_has_a_fragment() -> None:
    shared = {fragment["attention"]["class_path"] for fragment in FRAGMENTS.values()}
    assert shared == {f"anlit.{name}" for name in mechanisms.__all__}
