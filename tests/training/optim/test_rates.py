"""Factors of the rate by parameter group, for anlit's optimizers and for a user's."""

import copy
import math
from typing import Any

import pytest
import torch

from anlit import GPT, AdamW, AnGPT, MuonAdamW
from anlit.errors import UserError
from anlit.nn.models.transfer import MUP, Transfer
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.rates import GROUPS, base_rate, rate_factors
from tests.nn.models.tiny import random_tokens, tiny

FACTORS = {"embedding": 10.0, "head": 0.5, "vectors": 0.0}
TOKENS = random_tokens(2, 12)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The optimizer that a run of the model has."""
    groups = parameter_groups(model.model)
    return model.make_optimizer(groups)


def rates_of(model: Any) -> dict[str, float]:
    """Parameter group → its rate."""
    rates = {}
    for group in optimizer_of(model).param_groups:
        rates[group["name"]] = group["lr"]
    return rates


def backward(model: Any) -> None:
    loss = model.model(TOKENS).square().mean()
    loss.backward()


@pytest.mark.parametrize("optimizer", [AdamW, MuonAdamW, sgd])
def test_each_group_has_its_rate_times_its_factor(optimizer) -> None:
    plain = tiny(AnGPT, optimizer=optimizer)
    scaled = tiny(AnGPT, optimizer=optimizer, lr_factors=FACTORS)

    plain_rates = rates_of(plain)
    factored_rates = rates_of(scaled)

    assert factored_rates.keys() == plain_rates.keys()
    for name, rate in factored_rates.items():
        factor = FACTORS.get(name, 1.0)
        assert rate == pytest.approx(factor * plain_rates[name])


def test_a_step_moves_a_group_by_its_factor_and_decays_it_by_its_factor() -> None:
    """As two groups of torch's AdamW with these rates."""
    model = tiny(
        AnGPT,
        optimizer=lambda groups: AdamW(groups, lr=0.01, weight_decay=0.1),
        lr_factors={"embedding": 10.0},
    ).double()
    reference = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    groups = parameters_by_group(reference)
    adamw = torch.optim.AdamW(
        [
            {"params": groups["matrices"] + groups["head"], "lr": 0.01},
            {"params": groups["embedding"], "lr": 0.1},
            {"params": groups["vectors"], "lr": 0.01, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-9,
        weight_decay=0.1,
    )

    for stepped, stepper in ((model, optimizer), (reference, adamw)):
        for _ in range(3):
            stepped.zero_grad()
            backward(stepped)
            stepper.step()

    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)


def parameters_by_group(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    parameters = {}
    for group in parameter_groups(model.model):
        parameters[group["name"]] = group["params"]
    return parameters


def test_a_factor_of_0_freezes_a_group() -> None:
    model = tiny(GPT, lr_factors={"embedding": 0.0})
    initial_model = copy.deepcopy(model.model)
    optimizer = optimizer_of(model)

    backward(model)
    optimizer.step()

    assert torch.equal(model.model.embedding.weight, initial_model.embedding.weight)
    assert not torch.equal(model.model.head.weight, initial_model.head.weight)


def test_a_shared_matrix_has_the_factor_of_the_head() -> None:
    model = tiny(GPT, tie_embeddings=True, lr_factors={"embedding": 10.0, "head": 0.5})

    rates = rates_of(model)

    assert rates == pytest.approx({"matrices": 1e-3, "head": 5e-4, "vectors": 1e-3})


def test_the_factor_of_matrices_holds_for_w_o_and_w_d_if_depth_transfers() -> None:
    model = tiny(GPT, base_n_layers=2, lr_factors={"matrices": 3.0})

    rates = rates_of(model)

    assert rates["matrices"] == pytest.approx(3e-3)
    assert rates["residual_matrices"] == rates["matrices"]


@pytest.mark.parametrize(
    "factors",
    [
        {},
        {"matrices": 4.0},
        {"matrices": 0.0, "embedding": 2.0},
    ],
)
def test_the_base_rate_is_the_rate_before_the_factors(factors: dict[str, float]) -> None:
    model = tiny(GPT, lr_factors=factors)
    optimizer = optimizer_of(model)

    multiples = rate_factors(optimizer, factors, model.model.transfer)

    assert base_rate(optimizer, multiples) == pytest.approx(1e-3)
    assert base_rate(optimizer, [0.0] * 4) == 0


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            {"lm_head": 2.0},
            r"model\.lr_factors\.lm_head is not a parameter group: give embedding, ",
        ),
        (
            {"head": -1.0},
            r"model\.lr_factors\.head=-1\.0 is out of range: give 0 or more",
        ),
        (
            {"head": math.nan},
            r"model\.lr_factors\.head=nan is out of range: give a finite",
        ),
    ],
)
def test_a_wrong_factor_is_refused(factors, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(GPT, lr_factors=factors)


@pytest.mark.parametrize("setting", [{"lr_factors": {"head": 2.0}}, {"base_d_model": 16}])
def test_an_optimizer_that_drops_the_names_of_the_groups_is_refused(setting) -> None:
    model = tiny(GPT, optimizer=nameless, **setting)

    with pytest.raises(UserError, match="the names of the parameter groups, which Adam drops"):
        optimizer_of(model)


def nameless(groups: Any) -> torch.optim.Optimizer:
    weights: list[torch.nn.Parameter] = []
    for group in groups:
        weights += group["params"]
    return torch.optim.Adam(weights)


def test_transfer_is_refused_for_sgd_which_steps_by_the_gradients_size() -> None:
    model = tiny(GPT, optimizer=sgd, base_d_model=16)

    with pytest.raises(UserError, match="have no rule for SGD: choose AdamW or MuonAdamW"):
        optimizer_of(model)


def test_every_group_of_a_model_is_a_key_of_the_factors() -> None:
    model = tiny(GPT)

    assert sorted(GROUPS) == sorted(parameters_by_group(model))
    assert not Transfer(MUP).has_base
