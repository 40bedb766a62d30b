"""Parameter groups, and Muon with AdamW in a single optimizer."""

import copy
import io
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from anlit import GPT, NGPT, AdamW, AnGPT, LogN, MuonAdamW
from anlit.errors import UserError
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.schedule import Cosine
from tests.nn.models.tiny import architectures, random_tokens, tiny

TOKENS = random_tokens(2, 12)
MAPS = ("W_q", "W_k", "W_v", "W_o", "W_u", "W_z", "W_d", "output.W_g")
"""The matrices of a block."""


@architectures
def test_every_parameter_is_in_one_group_by_its_role(architecture) -> None:
    model = tiny(architecture, attention=LogN(), attention_gate="per_head").model
    names = {parameter: name for name, parameter in model.named_parameters()}

    groups = {}
    for group in parameter_groups(model):
        groups[group["name"]] = [names[weight] for weight in group["params"]]

    assert list(groups) == ["matrices", "embedding", "head", "vectors"]
    assert sorted(chain(*groups.values())) == sorted(names.values())
    assert groups["embedding"] == ["embedding.weight"]
    assert groups["head"] == ["head.weight"]
    assert "blocks.1.attention.mechanism.strength.value" in groups["vectors"]
    for layer, name in product(range(2), MAPS):
        groups["matrices"].remove(f"blocks.{layer}.{name}.weight")
    assert groups["matrices"] == [], "no other matrix"


@architectures
def test_decay_shrinks_matrices_and_leaves_vectors(architecture) -> None:
    model = tiny(architecture).model
    old_values = copy.deepcopy(dict(model.named_parameters()))
    optimizer = AdamW(parameter_groups(model), lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    optimizer.step()

    for name, parameter in model.named_parameters():
        expected = old_values[name]
        if parameter.ndim == 2:
            expected = (1 - 0.1 * 0.5) * expected
        torch.testing.assert_close(parameter, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "warmup", "weight_decay"),
    [
        (GPT, 0.2, 0.1),
        (NGPT, 0.0, 0.0),
        (AnGPT, 0.0, 0.0),
    ],
)
def test_settings_of_the_comparison_are_the_defaults(
    architecture, warmup: float, weight_decay: float
) -> None:
    model = tiny(architecture)

    optimizer = model.make_optimizer(parameter_groups(model.model))

    assert type(model.schedule) is Cosine
    assert model.schedule.warmup == warmup
    assert model.schedule.final == 0.01
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-9
        if group["name"] == "vectors":
            assert group["weight_decay"] == 0.0
        else:
            assert group["weight_decay"] == weight_decay


WEIGHT = torch.nn.Linear(2, 3).weight
TENSORS = [WEIGHT]
GROUPS = [{"params": [WEIGHT]}]


@pytest.mark.parametrize("params", [TENSORS, GROUPS], ids=["tensors", "groups"])
def test_a_rate_that_follows_the_size_needs_the_group_of_the_head(params: Any) -> None:
    message = r"lr=None follows the width of the group named head.*: give lr a number"

    with pytest.raises(UserError, match=message):
        AdamW(params, lr=None)

    (group,) = AdamW(params, lr=0.1).param_groups
    assert group["lr"] == 0.1


RATES = {
    "lr": 0.02,
    "embedding_lr": 0.03,
    "head_lr": 0.004,
    "vector_lr": 0.005,
}


def train(model, *optimizers_and_schedulers: torch.optim.Optimizer | LambdaLR) -> None:
    """Take three steps; an optimizer comes before its scheduler."""
    for _ in range(3):
        model.zero_grad()
        loss = model(TOKENS).square().mean()
        loss.backward()
        for stepper in optimizers_and_schedulers:
            stepper.step()


def decaying(optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_muon_steps_the_matrices_and_adamw_all_other_parameters_on_one_schedule(
    adjust_lr_fn,
) -> None:
    model = tiny(AnGPT).double().model
    reference = copy.deepcopy(model)
    muon_settings = {
        "momentum": 0.9,
        "weight_decay": 0.1,
        "adjust_lr_fn": adjust_lr_fn,
    }
    combined = MuonAdamW(parameter_groups(model), **RATES, **muon_settings)
    groups = {group["name"]: group["params"] for group in parameter_groups(reference)}
    muon = torch.optim.Muon(groups["matrices"], lr=0.02, **muon_settings)
    adamw = torch.optim.AdamW(
        [
            {"params": groups["embedding"], "lr": 0.03, "weight_decay": 0.1},
            {"params": groups["head"], "lr": 0.004, "weight_decay": 0.1},
            {"params": groups["vectors"], "lr": 0.005, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-9,
    )

    train(model, combined, decaying(combined))
    train(reference, muon, adamw, decaying(muon), decaying(adamw))

    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-6, atol=1e-6)


@architectures
def test_a_saved_run_continues_as_if_it_had_not_stopped(architecture) -> None:
    model = tiny(architecture).model
    optimizer = MuonAdamW(parameter_groups(model), **RATES)
    scheduler = decaying(optimizer)
    train(model, optimizer, scheduler)
    model_state = saved_and_loaded(model.state_dict())
    optimizer_state = saved_and_loaded(optimizer.state_dict())
    scheduler_state = saved_and_loaded(scheduler.state_dict())
    train(model, optimizer, scheduler)

    resumed_model = tiny(architecture, seed=5).model
    wrong_rates = dict.fromkeys(RATES, 1.0)
    resumed_optimizer = MuonAdamW(parameter_groups(resumed_model), **wrong_rates)
    resumed_scheduler = decaying(resumed_optimizer)
    resumed_model.load_state_dict(model_state)
    resumed_optimizer.load_state_dict(optimizer_state)
    resumed_scheduler.load_state_dict(scheduler_state)
    train(resumed_model, resumed_optimizer, resumed_scheduler)

    expected = model.state_dict()
    torch.testing.assert_close(resumed_model.state_dict(), expected, rtol=0, atol=0)
    assert rates_of(resumed_optimizer) == rates_of(optimizer)


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]
