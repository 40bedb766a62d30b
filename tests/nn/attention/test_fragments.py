"""Every YAML fragment in configs/attention/ builds a model, and every mechanism has a fragment."""

from typing import Any

import pytest
import torch
import yaml

from anlit.config.files import FOLDER
from anlit.config.objects import build_from_plain
from anlit.nn import mechanisms
from tests.nn.models.tiny import SIZE, architectures, random_tokens


def read_fragments() -> dict[str, Any]:
    """The settings of the model in each file of configs/attention/."""
    fragments = {}
    for path in (FOLDER / "attention").glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        fragments[path.stem] = content["model"]["init_args"]
    return fragments


FRAGMENTS = read_fragments()


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
@architectures
@pytest.mark.covering(1)
def test_every_fragment_builds_a_model(architecture, name) -> None:
    settings = {**SIZE, **FRAGMENTS[name]}
    model = build_from_plain(architecture, settings, name)
    tokens = random_tokens(2, 12)
    ids = torch.zeros_like(tokens)
    ids[:, 5:] = 1

    logits = model(tokens, ids)
    logits.square().sum().backward()

    assert logits.isfinite().all()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key


def test_every_mechanism_has_a_fragment() -> None:
    expected = {f"anlit.{name}" for name in mechanisms.__all__}

    class_paths = {fragment["attention"]["class_path"] for fragment in FRAGMENTS.values()}

    assert class_paths == expected
