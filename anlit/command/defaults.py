"""Default values that are objects, as the parser writes them into config.yaml: by class and arguments.

jsonargparse reads `attention: Mechanism = Plain()` out of a function's source, but not out of a dataclass.
"""

from typing import Any

from jsonargparse._typehints import ActionTypeHint
from torch import nn

from anlit.settings import part_as_plain

_theirs = ActionTypeHint.normalize_default


def _normalize_default(action: ActionTypeHint, default: Any) -> Any:
    return _theirs(action, part_as_plain(default) if isinstance(default, nn.Module) else default)


def spell_out_defaults() -> None:
    """Make the parser do so, for this process."""
    ActionTypeHint.normalize_default = _normalize_default  # type: ignore[method-assign]
