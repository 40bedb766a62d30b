"""The optimizer's rate that a configuration leaves open."""

from inspect import signature
from pydoc import locate

import torch
from jsonargparse import Namespace

from anlit.config.labels import class_name
from anlit.config.objects import subclass_named
from anlit.training.optim.optimizers import AdamW, rate_of_width


def set_rate_by_width(model: Namespace) -> None:
    """Set a null `lr` of AdamW to the rate for the model's width. Records then have it.

    With `base_d_model` it is the rate for that width, from which the rule of transfer goes on.
    """
    settings = model.get("init_args", {})
    optimizer = settings.get("optimizer")
    if not isinstance(optimizer, Namespace) or class_name(optimizer.get("class_path")) != "AdamW":
        return
    is_torch_adamw = locate(optimizer.class_path) is not AdamW
    if is_torch_adamw or optimizer.init_args.lr is not None or "d_model" not in settings:
        return
    width = settings.get("base_d_model") or settings.d_model
    optimizer.init_args.lr = rate_of_width(width)


def advice_on_default_rate(model: Namespace) -> str | None:
    """Return advice if `model.optimizer.lr` is a default, which is for new weights; else None.

    The configuration does not tell whether the user gave this number too.
    """
    optimizer = model.init_args.get("optimizer")
    if optimizer is None:
        return None
    optimizer_class = subclass_named(torch.optim.Optimizer, optimizer.class_path, "model.optimizer")
    parameter = signature(optimizer_class).parameters.get("lr")
    rate = optimizer.init_args.get("lr")
    if rate is None:
        source = "null, which follows the model's width"
    elif parameter is not None and rate == parameter.default:
        source = f"{rate:g}, which is also the default of {optimizer_class.__name__}"
    else:
        return None
    fix = "unless you chose it, set a lower one, such as --model.optimizer.lr 3e-5"
    return f"model.optimizer.lr is {source}, a rate for new weights: {fix}"
