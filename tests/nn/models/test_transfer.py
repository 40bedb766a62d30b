"""Rates and initial values that follow the size: formulas, and activations over width."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import GPT, NGPT, AdamW, AnGPT, MuonAdamW
from anlit.errors import UserError
from anlit.nn.models.transfer import Transfer
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import architectures, is_normalised, random_tokens, tiny

TOKENS = random_tokens(4, 17)
BASE = {"d_model": 32, "n_layers": 2}
GROWN = {"d_model": 64, "n_layers": 6, "n_heads": 4}
"""Twice as wide and three times as deep as the base."""
FROM_BASE = {"base_d_model": 32, "base_n_layers": 2}
normalised_architectures = pytest.mark.parametrize("architecture", [NGPT, AnGPT])


def make_adamw(groups: Any) -> torch.optim.Optimizer:
    return AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-3)


def train(model: LanguageModel, optimizer: torch.optim.Optimizer, n_steps: int = 4) -> Tensor:
    """Take some steps, and return the logits."""
    inputs = TOKENS[:, :-1]
    for _ in range(n_steps):
        optimizer.zero_grad()
        _, objective = model.model(inputs, targets=TOKENS[:, 1:])
        objective.backward()
        optimizer.step()
        model.model.restore_norms()
    with torch.no_grad():
        logits: Tensor = model.model(inputs)
    return logits


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    return model.make_optimizer(parameter_groups(model.model))


@architectures
@pytest.mark.parametrize("optimizer", [make_adamw, MuonAdamW])
def test_at_the_base_size_the_rule_changes_no_bit(architecture, optimizer) -> None:
    plain = tiny(architecture, optimizer=optimizer)
    at_base = tiny(architecture, optimizer=optimizer, **FROM_BASE)

    plain_logits = train(plain, optimizer_of(plain))
    logits_at_base = train(at_base, optimizer_of(at_base))

    assert torch.equal(logits_at_base, plain_logits)


def test_gpt_learns_as_with_the_factors_of_completep_in_its_forward_pass() -> None:
    """The published form: logits times 1/m, branches times 1/l, and rates of AdamW for them."""
    m = 2  # times as wide as the base
    deeper = 3  # times as deep
    model = tiny(GPT, optimizer=make_adamw, **GROWN, **FROM_BASE).double()
    published = tiny(GPT, **GROWN).double()
    published.model.load_state_dict(model.model.state_dict())
    matrices = []
    vectors = []
    for name, weight in published.model.blocks.named_parameters():
        if weight.ndim == 2:
            matrices.append(weight)
        else:
            vectors.append(weight)
        if name.endswith(("W_o.weight", "W_d.weight")):
            weight.data *= deeper
    for block in published.model.blocks:
        block.W_o.factor = 1 / deeper
        block.W_d.factor = 1 / deeper
    published.model.head.weight.data *= m
    published.model.head.factor = 1 / m
    vectors.append(published.model.norm_f.gain)
    outer = [published.model.embedding.weight, published.model.head.weight]
    eps = 1e-3 / m
    groups = [
        {"params": outer, "lr": 0.01, "eps": eps, "weight_decay": 0.1},
        {"params": matrices, "lr": 0.01 / m, "eps": eps / deeper, "weight_decay": 0.1 * m},
        {"params": vectors, "lr": 0.01, "eps": eps / deeper, "weight_decay": 0.0},
    ]
    published_optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    logits = train(model, optimizer_of(model))
    published_logits = train(published, published_optimizer)

    torch.testing.assert_close(logits, published_logits, rtol=1e-9, atol=1e-9)


def test_initial_matrices_of_gpt_follow_the_size() -> None:
    model = tiny(GPT, vocab_size=2000, init_std=0.1, **GROWN, **FROM_BASE).model
    inner = 0.1 / math.sqrt(2)
    branch = inner / math.sqrt(2 * 2) / 3
    expected = {
        "embedding": 0.1,
        "head": 0.1 / 2,
        "W_q": inner,
        "W_d": branch,
        "W_o": branch,
    }

    for name, weight in model.matrices():
        if name in expected:
            assert weight.std().item() == pytest.approx(expected[name], rel=0.06), name


def test_width_alone_leaves_the_depth_of_gpt_as_it_is() -> None:
    model = tiny(GPT, init_std=0.1, **GROWN, base_d_model=32).model

    names = [group["name"] for group in parameter_groups(model)]

    assert "residual_matrices" not in names
    expected = 0.1 / math.sqrt(2 * 6) / math.sqrt(2)
    std = model.blocks[0].W_d.weight.std()
    assert std.item() == pytest.approx(expected, rel=0.06)


@normalised_architectures
def test_groups_of_ngpt_and_angpt_have_the_powers_of_nugpt(architecture) -> None:
    model = tiny(architecture, optimizer=make_adamw, **GROWN, **FROM_BASE)

    groups = {group["name"]: group for group in optimizer_of(model).param_groups}

    powers = {
        "embedding": -1 / 2,
        "matrices": -3 / 4,
        "head": -3 / 4,
        "vectors": 0.0,
    }
    assert groups.keys() == powers.keys()
    for name, power in powers.items():
        group = groups[name]
        assert group["lr"] == pytest.approx(0.01 * 2**power)
        decay = 0.0 if name == "vectors" else 0.1
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.01 * decay)
        assert group["eps"] == 1e-3


@normalised_architectures
@pytest.mark.parametrize(
    ("settings", "alpha_init", "s_z_init"),
    [
        pytest.param({"alpha_init": None, "s_z_init": None}, None, math.sqrt(64), id="null"),
        pytest.param({"alpha_init": 0.3}, 0.3 / 3, math.sqrt(2), id="of the base"),
    ],
)
def test_vectors_of_ngpt_and_angpt_begin_by_the_size(
    architecture, settings, alpha_init: float | None, s_z_init: float
) -> None:
    model = tiny(architecture, **settings, **GROWN, **FROM_BASE).model

    alpha = model.blocks[0].alpha_A
    s_z = model.s_z
    if alpha_init is None:
        alpha_init = 1 / 12 if architecture is AnGPT else 1 / 6
    assert alpha.init == pytest.approx(alpha_init)
    assert s_z.init == pytest.approx(s_z_init)
    # A step of the rate η moves the vector by η/scale of its value, at all widths alike.
    assert alpha.scale == 1 / math.sqrt(32)
    assert s_z.scale == 1 / math.sqrt(32)


@architectures
@pytest.mark.parametrize(
    ("adjust_lr_fn", "power"),
    [
        (None, 0.0),
        ("match_rms_adamw", -0.5),
    ],
)
def test_muon_keeps_its_rate_or_follows_the_root_of_the_width(
    architecture, adjust_lr_fn, power: float
) -> None:
    rates = {"lr": 0.02, "head_lr": 0.004, "weight_decay": 0.1}
    optimizer = partial(MuonAdamW, **rates, adjust_lr_fn=adjust_lr_fn)
    model = tiny(architecture, optimizer=optimizer, **GROWN, **FROM_BASE)

    groups = {group["name"]: group for group in optimizer_of(model).param_groups}

    muon = torch.optim.Muon([torch.zeros(2, 2)])
    assert groups["matrices"]["lr"] == pytest.approx(0.02 * 2**power)
    assert groups["matrices"]["eps"] == muon.defaults["eps"]
    head_power = -3 / 4 if is_normalised(architecture) else -1
    assert groups["head"]["lr"] == pytest.approx(0.004 * 2**head_power)
    if architecture is GPT:
        assert groups["residual_matrices"]["lr"] == pytest.approx(0.02 * 2**power / 3)


def test_a_rate_that_is_null_follows_the_width_of_the_base() -> None:
    def largest_rate(**settings: Any) -> float:
        adamw = partial(AdamW, lr=None)
        model = tiny(NGPT, optimizer=adamw, d_model=512, **settings)
        return max(group["lr"] for group in optimizer_of(model).param_groups)

    assert largest_rate() == 1 / 512
    assert largest_rate(base_d_model=256) == 1 / 256


def change_of_h(architecture, width: int, rate: float, optimizer, **settings: Any) -> float:
    """The change of the last h by three steps: its root mean square per entry.

    The h of nGPT and anGPT has a norm of about 1 at all widths. Their change is the norm's root
    mean square per token.
    """
    states: list[Tensor] = []
    settings |= {"d_model": width, "d_head": 16, "n_heads": width // 16}
    if is_normalised(architecture):
        settings |= {"alpha_init": None, "s_z_init": None}
    optimizer = partial(optimizer, lr=rate)
    model = tiny(architecture, optimizer=optimizer, **settings).double()

    def record_h(block: torch.nn.Module, arguments: Any, h: Tensor) -> None:
        states.append(h.detach())

    model.model.blocks[-1].register_forward_hook(record_h)

    train(model, optimizer_of(model), 3)

    squares = (states[-1] - states[0]).square()  # (B, T, d)
    if is_normalised(architecture):
        squares = squares.sum(-1)
    return squares.mean().sqrt().item()


def match_rms(groups: Any, lr: float) -> torch.optim.Optimizer:
    return MuonAdamW(groups, lr=lr, embedding_lr=1e-4, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize(
    ("architecture", "rate", "optimizer"),
    [
        (GPT, 2e-3, AdamW),
        (NGPT, 2e-4, AdamW),
        (AnGPT, 2e-4, AdamW),
        (GPT, 2e-3, match_rms),
    ],
)
def test_activations_change_alike_at_all_widths_with_the_rule_only(
    architecture, rate: float, optimizer
) -> None:
    """The coordinate check of µP."""
    without_rule = {}
    with_rule = {}
    for width in (32, 64, 128):
        arguments = (architecture, width, rate, optimizer)
        without_rule[width] = change_of_h(*arguments)
        with_rule[width] = change_of_h(*arguments, base_d_model=32)

    assert with_rule[32] == without_rule[32]
    assert without_rule[128] > 2 * without_rule[32]
    for width in (64, 128):
        growth = with_rule[width] / with_rule[32]
        assert 0.7 < growth < 1.4


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"base_d_model": 16, "tie_embeddings": True}, "set model.tie_embeddings: false"),
        ({"base_n_layers": 1, "post_norm": True}, "set model.post_norm: false"),
    ],
)
def test_a_gpt_to_which_the_rule_does_not_apply_is_refused(settings, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        tiny(GPT, **settings)


def test_an_architecture_without_rules_takes_no_base() -> None:
    Transfer(rules={})

    with pytest.raises(UserError, match="need the decoder's transfer_rules, and it has none"):
        Transfer(rules={}, base_n_layers=2)
