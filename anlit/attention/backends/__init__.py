"""The kernels behind one contract, and the choice among them.

A back end is a module with `reason_against(mechanism) -> str | None` and
`attend(q, k, v, mechanism, documents, dropout) -> Tensor`, every tensor of shape (B, H, T, D), q and k of unit root
mean square, the logits scaled by 1/√D. A new one is one file and one entry in `BACKENDS`, ordered from the
fastest to the most general: `auto` takes the first that can do the mechanism.
"""

import logging
from types import ModuleType

from anlit.attention.backends import eager, sdpa
from anlit.attention.mechanism import Mechanism

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "eager": eager}

_log = logging.getLogger("anlit.attention")
_said: set[str] = set()


def choose(name: str, mechanism: Mechanism) -> ModuleType:
    """The back end called `name` for `mechanism`; `auto` takes the first that can, and says once which and why.

    Raises:
        ValueError: `name` is unknown, or that back end cannot do the mechanism; the message names those that can.
    """
    able = [key for key, backend in BACKENDS.items() if backend.reason_against(mechanism) is None]
    label = type(mechanism).__name__
    if name == "auto":
        reasons = [f"not {key}: {why}" for key, b in BACKENDS.items() if (why := b.reason_against(mechanism))]
        _say_once(
            f"attention {label} runs on the back end '{able[0]}'" + (f" ({'; '.join(reasons)})" if reasons else "")
        )
        return BACKENDS[able[0]]
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if (reason := BACKENDS[name].reason_against(mechanism)) is not None:
        raise ValueError(f"backend={name!r} cannot do attention {label}: {reason}; choose auto or {', '.join(able)}")
    return BACKENDS[name]


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.info(message)
