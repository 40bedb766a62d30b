"""The rate of each parameter group: the optimizer's, times factors of the user and of the size.

    model: {init_args: {lr_factors: {embedding: 10.0, vectors: 0.5}}}

The schedule multiplies all groups alike.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from anlit.config.value_checks import check_ranges
from anlit.errors import UserError
from anlit.nn.models.transfer import RESIDUAL_MATRICES, Transfer

LRFactors = Mapping[str, float]
"""Parameter group → the multiple of its rate. A group without an entry has 1."""
GROUPS = ("embedding", "head", "matrices", "vectors")


def check_lr_factors(factors: LRFactors) -> None:
    """Raise UserError for a factor that is out of range, or of an unknown group."""
    for group in factors:
        if group not in GROUPS:
            raise UserError(
                f"model.lr_factors.{group} is not a parameter group: give {', '.join(GROUPS)}"
            )
    check_ranges("model.lr_factors", factors)


def rate_factors(optimizer: Optimizer, factors: LRFactors, transfer: Transfer) -> list[float]:
    """The multiple of its rate for each of the optimizer's groups, as `scale_rates` takes it."""
    if not factors and not transfer.has_base:
        return [1.0] * len(optimizer.param_groups)
    multiples = []
    for group in optimizer.param_groups:
        factor = factors.get(factor_key(group["name"]), 1.0)
        multiples.append(factor * size_factor(group, transfer))
    return multiples


def scale_rates(optimizer: Optimizer, factors: LRFactors, transfer: Transfer) -> Optimizer:
    """Multiply the rates of the optimizer's groups, in place, and return it.

    `factors` leave the weight decay alone. So a group decays by its rate times the decay, as in
    torch. `transfer` divides the decay by its factor. The product stays the base's, as CompleteP
    has it. It also scales Adam's ε.

    Args:
        optimizer: Made from `parameter_groups`.
        factors: The user's, by group.
        transfer: The decoder's.

    Raises:
        UserError: The optimizer's groups have lost their names, or transfer has no rule for it.
    """
    if not factors and not transfer.has_base:
        return optimizer
    _check_optimizer(optimizer, transfer)
    for group in optimizer.param_groups:
        factor = size_factor(group, transfer)
        group["lr"] *= factor * factors.get(factor_key(group["name"]), 1.0)
        if "weight_decay" in group:
            group["weight_decay"] /= factor
        # Muon's ε guards a division by a norm, which no size changes.
        if transfer.has_base and "eps" in group and not is_of_muon(group):
            group["eps"] *= transfer.epsilon_factor(group["name"])
    return optimizer


class ScaledOptimizer:
    """Makes an optimizer of parameter groups and scales its rates, see `scale_rates`.

    A deep copy of a model shares it, because the parser's partial cannot be copied.
    """

    def __init__(
        self,
        make_optimizer: Callable[[Iterable[Any]], Optimizer],
        factors: LRFactors,
        transfer: Transfer,
    ) -> None:
        self.make_optimizer = make_optimizer
        self.factors = factors
        self.transfer = transfer

    def __call__(self, groups: Iterable[Any]) -> Optimizer:
        return scale_rates(self.make_optimizer(groups), self.factors, self.transfer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScaledOptimizer":
        return self


def factor_key(group: str) -> str:
    """The key of `lr_factors` that holds for a group."""
    return "matrices" if group == RESIDUAL_MATRICES else group


def size_factor(group: dict[str, Any], transfer: Transfer) -> float:
    """The factor of a group's rate that follows from the size; 1 without a base."""
    if not transfer.has_base:
        return 1.0
    if is_of_muon(group):
        return transfer.muon_rate_factor(group["name"], group["adjust_lr_fn"])
    return transfer.rate_factor(group["name"])


def is_of_muon(group: dict[str, Any]) -> bool:
    """Whether torch's Muon steps a group."""
    return "ns_steps" in group


def _check_optimizer(optimizer: Optimizer, transfer: Transfer) -> None:
    kind = type(optimizer).__name__
    names = [factor_key(group.get("name", "")) for group in optimizer.param_groups]
    if not set(names) <= set(GROUPS):
        raise UserError(
            f"model.lr_factors and base_d_model need the names of the parameter groups, which "
            f"{kind} drops: let its param_groups be the groups that it is called with"
        )
    if transfer.has_base and isinstance(optimizer, torch.optim.SGD):
        raise UserError(
            f"model.base_d_model and base_n_layers have no rule for {kind}: choose AdamW or "
            "MuonAdamW, or leave them out"
        )


def base_rate(optimizer: Optimizer, factors: list[float]) -> float:
    """The rate before the factors, from the first group whose factor is not 0."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        if factor:
            return float(group["lr"]) if factor == 1 else float(group["lr"]) / factor
    return 0.0
