"""A run begins from the weights of another run; weights that do not fit are refused."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit import GPT, AnGPT, LogN, ScaleInvariant, SqrtLogN, WarmStart
from anlit.errors import UserError
from anlit.training.initial_weights import load_initial_weights
from tests.nn.models.tiny import fit, random_tokens, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model = fit(tiny(GPT, seed=1), max_steps=2)
    file = tmp_path_factory.mktemp("run") / "checkpoints" / "best.ckpt"
    model.trainer.save_checkpoint(file)
    return file


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (
            AnGPT,
            {},
            "holds GPT, but the configuration's model is AnGPT: set --model GPT",
        ),
        (
            GPT,
            {"d_model": 16},
            r"embedding.weight is \(29, 32\) in it and \(29, 16\) in the model",
        ),
        (
            GPT,
            {"n_layers": 3},
            r"blocks\.2\.\S+ is missing in it and \S+ in the model",
        ),
        (
            GPT,
            {"n_layers": 1},
            r"blocks\.1\.\S+ is \S+ in it and missing in the model",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    checkpoint: Path, architecture: Any, settings: dict[str, int], message: str
) -> None:
    model = tiny(architecture, **settings)
    old_weights = copy.deepcopy(model.state_dict())

    with pytest.raises(UserError, match=message):
        load_initial_weights(model, str(checkpoint))

    torch.testing.assert_close(model.state_dict(), old_weights, rtol=0, atol=0)


def test_the_same_mechanism_needs_no_line_in_the_log(checkpoint: Path, caplog) -> None:
    run = checkpoint.parents[1]

    load_initial_weights(tiny(GPT), str(run))

    assert not caplog.records


@pytest.mark.parametrize(
    "mechanism",
    [ScaleInvariant(tau=2.0, learned="per_layer"), LogN(), SqrtLogN(learned="globally")],
    ids=["scale-invariant", "LogN", "SqrtLogN"],
)
def test_the_attention_may_change_and_starts_as_plain_attention(
    checkpoint: Path, mechanism: Any, caplog
) -> None:
    """tests/parity compares a warm start with its formula."""
    plain = tiny(GPT)
    load_initial_weights(plain, str(checkpoint))
    changed = tiny(GPT, attention=WarmStart(mechanism, steps=4))

    with caplog.at_level("INFO"):
        load_initial_weights(changed, str(checkpoint))

    assert "attention is plain in" in caplog.text
    tokens = random_tokens(2, 16)
    # Another kernel rounds differently.
    assert torch.allclose(changed(tokens), plain(tokens), atol=1e-6)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """A checkpoint with a strength of LogN that differs from its initial value."""
    model = tiny(GPT, attention=LogN())
    with torch.no_grad():
        strength_of(model).fill_(7.0)
    fit(model, 1)
    file = tmp_path_factory.mktemp("learned") / "best.ckpt"
    model.trainer.save_checkpoint(file)
    return file


def strength_of(model: Any) -> torch.Tensor:
    return model.model.blocks[1].attention.mechanism.strength.value


def test_the_same_mechanism_takes_its_learned_weights(learned: Path) -> None:
    model = tiny(GPT, attention=LogN(s=0.9))

    load_initial_weights(model, str(learned))

    saved = torch.load(learned, weights_only=True)["state_dict"]
    name = "model.blocks.1.attention.mechanism.strength.value"
    assert torch.equal(strength_of(model), saved[name])
    assert strength_of(model).tolist() == pytest.approx([7.0, 7.0], abs=0.1)


def test_a_checkpoint_outside_of_a_run_is_known_by_its_weights(learned: Path, tmp_path) -> None:
    content = torch.load(learned, weights_only=True)
    copied = shutil.copy(learned, tmp_path / "copy.ckpt")
    content["state_dict"]["model.head.weight"][0, 0] += 1
    torch.save(content, tmp_path / "other.ckpt")
    identities = []
    for path in (learned, copied, tmp_path / "other.ckpt"):
        model = tiny(GPT, attention=LogN())
        load_initial_weights(model, str(path))
        identities.append(model.begun_from)

    original, identity_of_copy, identity_of_other = identities

    assert original == identity_of_copy
    assert original != identity_of_other


def test_another_mechanism_keeps_its_initial_weights(learned: Path) -> None:
    model = tiny(GPT, attention=SqrtLogN(r=0.9, learned="per_head"))

    load_initial_weights(model, str(learned))

    assert strength_of(model).tolist() == pytest.approx([0.9, 0.9])
