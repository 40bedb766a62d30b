"""What a subclass of `LanguageModel` from another package may do. In this file `model` is one."""

import inspect
from collections.abc import Collection
from types import CodeType, FunctionType
from typing import Any

from anlit.config.objects import is_of_anlit, parameters_of
from anlit.errors import UserError

SHOWN_PARAMETERS = 3
"""Names of parameters in a message."""


def refuse_replaced_hooks(kind: type, base: type) -> None:
    """Raise UserError if a subclass of `base` overrides a hook without calling the base's.

    Lightning's own hooks are empty, so its users leave out `super()`. In the hooks of
    `LanguageModel` optimizer steps restore norms, and checkpoints get their record.
    """
    subclasses = kind.__mro__[: kind.__mro__.index(base)]
    for owner in subclasses:
        for name, method in vars(owner).items():
            if _is_hook(base, name) and _lacks_call(owner, method, name):
                raise UserError(
                    f"{owner.__name__}.{name} replaces a method of anlit that a run needs: call "
                    f"super().{name}(…) in it{HINTS.get(name, '')}"
                )


def _is_hook(base: type, name: str) -> bool:
    is_method = inspect.isfunction(vars(base).get(name))
    return is_method and not name.startswith("__") and name not in FREE_METHODS


def _lacks_call(owner: type, method: Any, name: str) -> bool:
    """Whether neither a method nor the other methods of its class have the name in their code.

    Nothing is known about objects that are not functions, and about a decorator's own function,
    which has another name.
    """
    method = inspect.unwrap(method)
    if not isinstance(method, FunctionType) or method.__name__ != name:
        return False
    functions = map(inspect.unwrap, vars(owner).values())
    codes = [item.__code__ for item in functions if isinstance(item, FunctionType)]
    return name not in set().union(*map(_names_in, [method.__code__, *codes]))


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals in a code, and in the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


FREE_METHODS = ("forward", "loss_of")
"""Methods that a subclass may replace."""
HINTS = {
    "training_step": ", or override loss_of",
    "validation_step": ", or override loss_of",
    "configure_optimizers": ", or give the settings optimizer and schedule",
}
"""What may be meant, by the name of the hook."""


def settings_within(kind: type, names: Collection[str]) -> list[str]:
    """Return the names of settings that a class of another package gives to its base itself.

    They are no arguments of its constructor, so a checkpoint must not name them. If it hands on
    arguments in a way that cannot be read from its source, nothing is known about them.
    """
    if is_of_anlit(kind):
        return []
    arguments = [parameter.name for parameter in parameters_of(kind)]
    signature = inspect.signature(kind).parameters.values()
    hands_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature)
    if hands_on and len(arguments) < len(signature):
        return []
    return [name for name in names if name not in arguments]


def refuse_untrained_parameters(model: Any) -> None:
    """Raise UserError for parameters outside of the decoder, unless they are frozen."""
    trained = {id(parameter) for parameter in model.model.parameters()}
    untrained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            untrained.append(name)
    if untrained:
        names = ", ".join(untrained[:SHOWN_PARAMETERS])
        more = ", …" if len(untrained) > SHOWN_PARAMETERS else ""
        raise UserError(
            f"{type(model).__name__} has parameters outside of its decoder ({names}{more}), which "
            "no optimizer would change: make them in the decoder, or freeze them with "
            "requires_grad_(False)"
        )
