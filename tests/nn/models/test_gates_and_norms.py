"""Gates, further norms and QK-clip in training: initial values, learning, bounds."""

import copy

import pytest
import torch
from torch import nn

from anlit import (
    GPT,
    NGPT,
    AnGPT,
    AttentionPattern,
    LogN,
    NoPE,
    PositionsPattern,
    RoPE,
    SlidingWindow,
    load_checkpoint,
)
from anlit.nn.kernels.documents import Documents
from tests.nn.models.tiny import (
    CONSTANT,
    SIZE,
    adamw,
    architectures,
    batches,
    fit,
    is_normalised,
    random_tokens,
    tiny,
)

IDS = torch.zeros(2, 12, dtype=torch.int64)
IDS[0, 5:] = 1
BATCH = random_tokens(2, 12), IDS


@pytest.mark.parametrize("gate", ["per_head", "per_element"])
@architectures
def test_gates_start_at_one_and_learn_within_the_bound(architecture, gate) -> None:
    model = tiny(
        architecture,
        attention_gate=gate,
        optimizer=adamw(lr=0.3, weight_decay=0.0),
        schedule=CONSTANT,
    )
    n_gates = SIZE["n_heads"] if gate == "per_head" else SIZE["d_model"]
    weights = [block.output.W_g.weight for block in model.model.blocks]
    without_gates = tiny(architecture).model
    assert torch.equal(model.model(*BATCH), without_gates(*BATCH))

    fit(model, max_steps=3)

    for weight in weights:
        assert weight.shape[0] == n_gates
        assert weight.abs().max() > 0
    largest = torch.cat(weights).norm(dim=1).max()
    if is_normalised(architecture):
        assert 0.999 < largest <= 1 + 1e-6, "a rate of 0.3 runs into the bound"


def largest_scores(model: nn.Module) -> torch.Tensor:
    """The largest score of each layer and head on the first training batch, (L, H)."""
    batch = next(iter(batches(4, SIZE["context_length"])))
    model.train()
    with torch.no_grad():
        model(batch.tokens, batch.document_ids)
    scores = [block.attention.clip.largest for block in model.model.blocks]
    return torch.stack(scores)


SHARED_KEYS = {"n_heads": 4, "n_kv_heads": 2}


@pytest.mark.parametrize("heads", [{}, SHARED_KEYS], ids=["separate keys", "shared keys"])
@pytest.mark.parametrize(
    ("architecture", "qk_norm", "qk_gain"),
    [
        (GPT, False, None),
        (GPT, True, None),
        (NGPT, True, None),
        (NGPT, False, None),
        (AnGPT, False, None),
        (AnGPT, True, True),
    ],
)
def test_qk_clip_brings_the_largest_score_to_its_threshold(
    architecture, qk_norm, qk_gain, heads
) -> None:
    """The step has a rate of 0. Heads with small scores do not change, nor with shared keys."""
    settings = {
        "qk_norm": qk_norm,
        "qk_norm_gain": qk_gain,
        "optimizer": adamw(lr=0.0),
        "schedule": CONSTANT,
        **heads,
    }
    unclipped = largest_scores(tiny(architecture, **settings, qk_clip=1e9))
    first_layer = unclipped[0]
    threshold = float(first_layer.median())  # over half of its heads
    model = tiny(architecture, **settings, qk_clip=threshold)

    fit(model, max_steps=1, batch_size=2, accumulate=2)  # the same sequences in two micro-batches

    clipped = largest_scores(model)[0]
    expected = first_layer.clamp_max(threshold)
    if qk_norm and architecture is not NGPT:  # all heads share a gain: all shrink alike
        factor = threshold / float(first_layer.max())
        expected = first_layer * min(1.0, factor)
    torch.testing.assert_close(clipped, expected, rtol=1e-4, atol=1e-5)
    assert (clipped < first_layer - 1e-4).any()


def test_qk_clip_counts_visible_keys_alone() -> None:
    model = tiny(GPT, qk_norm=False, attention=SlidingWindow(3), qk_clip=1.0)
    block = model.model.blocks[0]
    q, k = torch.zeros(2, 1, 2, 8, 16)
    q[0, 0, 6, 0] = 40.0
    k[0, 0, 2, 0] = 40.0  # four tokens before: outside the window
    q[0, 1, 3, 0] = 40.0
    k[0, 1, 5, 0] = 40.0  # ahead
    q[0, 0, 4, 0] = 1.0  # two tokens after the key
    documents = Documents(None, 8, q.device)

    block.attention(q, k, k, documents)
    assert block.attention.clip.largest.tolist() == [10.0, 0.0]

    model.eval()
    block.attention(9 * q, k, k, documents)
    assert block.attention.clip.largest.tolist() == [10.0, 0.0]


@architectures
def test_the_epsilon_of_qk_norm_adds_no_parameter(architecture) -> None:
    plain = tiny(architecture, qk_norm_gain=False).model
    with_epsilon = tiny(architecture, qk_norm_gain=False, qk_norm_eps=0.1).model

    assert with_epsilon.state_dict().keys() == plain.state_dict().keys()


@architectures
def test_all_settings_train_and_come_back_from_a_checkpoint(architecture, tmp_path) -> None:
    model = tiny(
        architecture,
        attention=AttentionPattern([SlidingWindow(4, LogN()), LogN(s=0.7)]),
        qk_clip=5.0,
        v_norm=True,
        positions=PositionsPattern([RoPE(fraction=0.5), NoPE()]),
        qk_norm_gain=True,
        qk_norm_eps=0.1,
        attention_norm=True,
        attention_gate="per_head",
        post_norm=True,
    )
    initial_parameters = copy.deepcopy(dict(model.named_parameters()))

    fit(model, max_steps=3)

    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, initial_parameters[name]), f"{name} did not learn"
    model.trainer.strategy.connect(model)
    file = tmp_path / "model.ckpt"
    model.trainer.save_checkpoint(file, weights_only=True)
    loaded = load_checkpoint(str(file), "cpu").model
    expected = model.eval()(*BATCH).detach()  # other kernels than without gradients
    torch.testing.assert_close(loaded(*BATCH), expected, rtol=1e-5, atol=1e-5)
