"""The optimizer's rate that a configuration leaves open."""

from inspect import signature
from pydoc import locate

import torch
from jsonargparse import Namespace

from anlit.config.labels import class_name
from anlit.config.objects import subclass_named
from anlit.nn.models.angpt import AnGPTDecoder
from anlit.nn.models.decoder import Decoder
from anlit.training.language_model import LanguageModel
from anlit.training.models import AnGPT
from anlit.training.optim.optimizers import AdamW, default_rate


def set_rate_by_size(model: Namespace) -> None:
    """Set a null `lr` of AdamW to the default rate for the model's size. Records then have it.

    With a base it is the rate for the base's size, from which the rules of transfer go on.
    """
    settings = model.get("init_args", {})
    optimizer = settings.get("optimizer")
    if not isinstance(optimizer, Namespace) or class_name(optimizer.get("class_path")) != "AdamW":
        return
    is_torch_adamw = locate(optimizer.class_path) is not AdamW
    if is_torch_adamw or optimizer.init_args.lr is not None or "d_model" not in settings:
        return
    is_angpt = issubclass(subclass_named(LanguageModel, model.class_path, "model"), AnGPT)
    decoder = AnGPTDecoder if is_angpt else Decoder
    optimizer.init_args.lr = default_rate(
        settings.get("base_d_model") or settings.d_model,
        settings.get("base_n_layers") or settings.n_layers,
        decoder.layers_at_full_rate,
    )


def advice_on_default_rate(model: Namespace) -> str | None:
    """Return advice if `model.optimizer.lr` is a default, which is for new weights; else None."""
    optimizer = model.init_args.get("optimizer")
    if optimizer is None:
        return None
    optimizer_class = subclass_named(torch.optim.Optimizer, optimizer.class_path, "model.optimizer")
    parameter = signature(optimizer_class).parameters.get("lr")
    rate = optimizer.init_args.get("lr")
    if rate is None:
        source = "null, which follows the model's size"
    elif parameter is not None and rate == parameter.default:
        source = f"{rate:g}, the default"
    else:
        return None
    fix = "set a lower one, such as --model.optimizer.lr 3e-5"
    return f"model.optimizer.lr is {source}, a rate for new weights: {fix}"
