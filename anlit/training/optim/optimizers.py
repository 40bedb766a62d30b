"""Parameter groups with every parameter, and Muon with AdamW in a single optimizer."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from anlit.config.value_checks import check_ranges
from anlit.errors import UserError
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.transfer import RESIDUAL_MATRICES
from anlit.training.optim.muon import muon_step

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""A function that makes an optimizer from the groups of `parameter_groups`."""


def name_default_optimizer(model_class: Any) -> None:
    """Make the default of a model class's setting `optimizer` a static method `default_optimizer`.

    The parser reads this default only from a lambda, whose name pickle does not find.
    """
    constructor = vars(model_class).get("__init__")
    if not inspect.isfunction(constructor):  # inherited
        return
    setting = inspect.signature(constructor).parameters.get("optimizer")
    if setting is not None and inspect.isfunction(setting.default):
        model_class.default_optimizer = staticmethod(setting.default)
        setting.default.__qualname__ = f"{model_class.__qualname__}.default_optimizer"


def parameter_groups(model: Decoder) -> list[dict[str, Any]]:
    """Four groups by role: `matrices`, `embedding`, `head` and `vectors`.

    A matrix that embedding and head share is in `head`. `vectors` are all other parameters: gains,
    scales and parameters of attention mechanisms. They have no weight decay. If depth changes the
    rate of W_o and W_d, they are a fifth group, `residual_matrices`.
    """
    maps = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    roles: dict[str, list[nn.Parameter]] = {
        "matrices": [],
        RESIDUAL_MATRICES: [],
        "embedding": [],
        "head": [],
        "vectors": [],
    }
    for name, parameter in model.named_parameters():
        is_map = id(parameter) in maps
        if name.startswith(("embedding.", "head.")):
            role = "head" if is_map else "embedding"
        elif not is_map:
            role = "vectors"
        elif model.transfer.splits_residual and name.endswith((".W_o.weight", ".W_d.weight")):
            role = RESIDUAL_MATRICES
        else:
            role = "matrices"
        roles[role].append(parameter)
    groups: list[dict[str, Any]] = []
    for role, params in roles.items():
        if params:
            groups.append({"name": role, "params": params})
    settings = {group["name"]: group for group in groups}
    if "vectors" in settings:
        settings["vectors"]["weight_decay"] = 0.0
    if model.transfer.base_d_model is not None:
        settings["head"]["base_d_model"] = model.transfer.base_d_model
    return groups


def rate_of_width(d_model: int) -> float:
    """AdamW's default rate: near the best rate of models of width 32 to 128, 1e-3 at 1,024."""
    return min(1 / d_model, 0.016)


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the settings of [anGPT]'s comparison as defaults, and the fused kernel.

    Args:
        params: Groups from `parameter_groups`.
        lr: Peak learning rate; 1/d_model, at most 0.016, if null (docs/results/architectures.md).
            With a base the width is base_d_model.
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
        check_ranges("model.optimizer", locals())
        groups = list(params)
        if lr is None:
            lr = rate_of_width(_width_of_head(groups))
        super().__init__(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused
        )


def _width_of_head(groups: list[dict[str, Any]]) -> int:
    """The width of the model or its base, by the matrix (V, d_model) of the group `head`."""
    for group in groups:
        if isinstance(group, dict) and group.get("name") == "head":
            return int(group.get("base_d_model", group["params"][0].shape[1]))
    raise UserError(
        "AdamW's lr=None follows the width of the group named head, and there is none: give lr a "
        "number"
    )


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on the blocks' matrices, AdamW on all other parameters.

    Lightning and schedulers see a single optimizer.

    Args:
        params: Groups from `parameter_groups`.
        lr: Rate of the matrices (Muon).
        momentum: Muon's momentum.
        weight_decay: Decoupled decay of matrices, embedding and head.
        embedding_lr: AdamW's rate of the embedding; [SI] uses 0.3 for GPT-2 sized models.
        head_lr: AdamW's rate of the head, and of the matrix of a tied embedding and head.
        vector_lr: AdamW's rate of gains and scaling vectors.
        betas: AdamW's averaging coefficients.
        eps: AdamW's ε.
        adjust_lr_fn: The dependence of Muon's rate on a matrix's shape: `original` (the default)
            or `match_rms_adamw`.
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
        check_ranges("model.optimizer", locals())
        rates = {
            "matrices": lr,
            RESIDUAL_MATRICES: lr,
            "embedding": embedding_lr,
            "head": head_lr,
            "vectors": vector_lr,
        }
        groups = [{**group, "lr": rates[group["name"]]} for group in params]
        muon_groups, adamw_groups = _split(groups)
        self._muon = torch.optim.Muon(
            muon_groups,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn=adjust_lr_fn,
        )
        self._adamw = torch.optim.AdamW(
            adamw_groups, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        all_groups = [*self._muon.param_groups, *self._adamw.param_groups]
        super().__init__(all_groups, defaults={"lr": lr})
        self._share_state()

    def _share_state(self) -> None:
        """Let Muon and AdamW use this optimizer's state and groups, which Lightning saves."""
        self._muon.param_groups, self._adamw.param_groups = _split(self.param_groups)
        self._muon.state = self.state
        self._adamw.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        muon_step(self._muon)
        self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_state()


def _split(groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups of Muon, and the groups of AdamW."""
    of_muon = ("matrices", RESIDUAL_MATRICES)
    muon_groups = [group for group in groups if group["name"] in of_muon]
    adamw_groups = [group for group in groups if group["name"] not in of_muon]
    return muon_groups, adamw_groups
