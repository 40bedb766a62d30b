"""Parameter groups that account for every parameter, and Muon with AdamW in one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from anlit.errors import UserError
from anlit.optim.muon import muon_step

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Makes an optimizer from the groups of `parameter_groups`."""


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Four groups by role: `matrices`, `embedding`, `head` and `vectors`.

    A matrix that embedding and head share is in `head`. `vectors` are all other parameters: gains, scales and those of
    attention mechanisms. They have no weight decay.
    """
    named = dict(model.named_parameters())
    maps = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    roles: dict[str, list[nn.Parameter]] = {"matrices": [], "embedding": [], "head": [], "vectors": []}
    for name, parameter in named.items():
        if name.startswith("embedding.") and id(parameter) not in maps:
            roles["embedding"].append(parameter)
        elif name.startswith(("embedding.", "head.")):
            roles["head"].append(parameter)
        else:
            roles["matrices" if id(parameter) in maps else "vectors"].append(parameter)
    grouped = [parameter for role in roles.values() for parameter in role]
    assert len(grouped) == len(set(map(id, grouped))) == len(named), "a parameter is in no group or in two"
    settings: dict[str, dict[str, Any]] = {"vectors": {"weight_decay": 0.0}}
    return [{"name": name, "params": params, **settings.get(name, {})} for name, params in roles.items() if params]


def default_rate(groups: Iterable[Any]) -> float:
    """1/d_model, at most 0.016: near the best of tuned models of width 32 to 128, and 1e-3 at width 1,024.

    Raises:
        UserError: No group is named head, whose width is d_model.
    """
    heads = [group["params"] for group in groups if isinstance(group, dict) and group.get("name") == "head"]
    if not heads:
        raise UserError(
            "AdamW's lr=None follows the width of the group named head, and there is none: give lr a number"
        )
    return min(1 / next(iter(heads[0])).shape[1], 0.016)


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the settings of [anGPT]'s comparison as defaults, and the fused kernel.

    Args:
        params: Groups from `parameter_groups`.
        lr: Peak learning rate; 1/d_model, at most 0.016, if null (docs/results/architectures.md).
        betas: Averaging coefficients of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of matrices, embedding and head.
        fused: One kernel for all parameters; several times faster on CPU too.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-9,
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        groups = list(params)
        peak = default_rate(groups) if lr is None else lr
        super().__init__(groups, lr=peak, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on the blocks' matrices, AdamW on the rest, as one optimizer for Lightning and schedulers.

    Args:
        params: Groups from `parameter_groups`.
        lr: Rate of the matrices (Muon).
        momentum: Muon's momentum.
        weight_decay: Decoupled decay of matrices, embedding and head.
        embedding_lr: AdamW's rate of the embedding; [SI] uses 0.3 for GPT-2 sized models.
        head_lr: AdamW's rate of the head, and of a matrix that the embedding shares with it.
        vector_lr: AdamW's rate of gains and scaling vectors.
        betas: AdamW's averaging coefficients.
        eps: AdamW's ε.
        adjust_lr_fn: How Muon's rate depends on a matrix's shape: `original` or `match_rms_adamw`.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        embedding_lr: float = 0.3,
        head_lr: float = 0.002,
        vector_lr: float = 0.002,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-9,
        adjust_lr_fn: str | None = None,
    ) -> None:
        rates = {"matrices": lr, "embedding": embedding_lr, "head": head_lr, "vectors": vector_lr}
        groups = [{**group, "lr": rates[group["name"]]} for group in params]
        matrices = [group for group in groups if group["name"] == "matrices"]
        others = [group for group in groups if group["name"] != "matrices"]
        self._parts = (
            torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn),
            torch.optim.AdamW(others, betas=betas, eps=eps, weight_decay=weight_decay, fused=True),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], defaults={"lr": lr})
        self._share()

    def _share(self) -> None:
        """Make both parts work on this optimizer's own state and groups, which are saved and scheduled as one."""
        muon, adamw = self._parts
        muon.param_groups = [group for group in self.param_groups if group["name"] == "matrices"]
        adamw.param_groups = [group for group in self.param_groups if group["name"] != "matrices"]
        muon.state = adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, adamw = self._parts
        muon_step(muon)
        adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
