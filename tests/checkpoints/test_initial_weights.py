"""A run that starts from another one's weights; refusals of what does not fit."""

from pathlib import Path

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


@pytest.mark.parametrize(("architecture", "changes", "message"), [
    (AnGPT, {}, "holds GPT, but the configuration's model is AnGPT: set --model GPT"),
    (GPT, {"d_model": 16}, r"embedding.weight is \(29, 32\) in it and \(29, 16\) in the model"),
    (GPT, {"n_layers": 3}, r"blocks\.2\.\S+ is missing in it and \S+ in the model"),
    (GPT, {"n_layers": 1}, r"blocks\.1\.\S+ is \S+ in it and missing in the model"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    checkpoint: Path, architecture, changes: dict[str, int], message: str
) -> None:
    other = tiny(architecture, **changes)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_initial_weights(other, str(checkpoint))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_the_attention_may_change_and_starts_as_plain_attention(checkpoint: Path, caplog) -> None:
    """What a warm start computes on its way is in tests/parity."""
    plain, tokens = tiny(GPT), random_tokens(2, 16)
    load_initial_weights(plain, str(checkpoint.parents[1]))  # the run's folder
    assert not caplog.records, "the same mechanism needs no line"
    for mechanism in (
        ScaleInvariant(tau=2.0, learned="per_layer"),
        LogN(),
        SqrtLogN(learned="globally"),
    ):
        changed = tiny(GPT, attention=WarmStart(mechanism, steps=4))
        with caplog.at_level("INFO"):
            load_initial_weights(changed, str(checkpoint))
        assert "attention is plain in" in caplog.text
        assert torch.allclose(changed(tokens), plain(tokens), atol=1e-6), (
            "but for the rounding of another kernel"
        )


def test_what_the_same_mechanism_learned_is_taken_and_what_another_one_learned_is_not(
    tmp_path: Path,
) -> None:
    learned = tiny(GPT, attention=LogN())
    with torch.no_grad():
        learned.model.blocks[1].attention.mechanism.strength.value.fill_(7.0)
    fit(learned, 1)
    learned.trainer.save_checkpoint(tmp_path / "best.ckpt")
    same, other = (
        tiny(GPT, attention=LogN(s=0.9)),
        tiny(GPT, attention=SqrtLogN(r=0.9, learned="per_head")),
    )
    for model in (same, other):
        load_initial_weights(model, str(tmp_path / "best.ckpt"))
    values = [
        model.model.blocks[1].attention.mechanism.strength.value for model in (learned, same, other)
    ]
    assert torch.equal(values[0], values[1])
    assert values[2].tolist() == pytest.approx([0.9, 0.9])
