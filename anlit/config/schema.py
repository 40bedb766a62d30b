"""The ranges of numbers in a configuration, one table for the command line, which refuses a number before anything is
made, and for constructors, which refuse it in Python; and the precisions that anlit trains in. Without torch."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from anlit.errors import UserError

SIZES = (
    "context_length",
    "d_ff",
    "d_head",
    "d_model",
    "n_heads",
    "n_kv_heads",
    "n_layers",
    "vocab_size",
)
COUNTS = ("checkpoint_every_n_steps", "trainer.accumulate_grad_batches", "trainer.num_nodes")
BATCHES = ("data.batch_size", "data.context_length", "data.val_batch_size", "data.val_blocks",
           "data.val_context_length", "data.val_samples", "data.val_tokens")  # fmt: skip
EPSILONS = ("norm_eps", "qk_norm_eps", "optimizer.eps")
RATES = ("embedding_lr", "head_lr", "lr", "vector_lr", "weight_decay")
AMOUNTS = ("gradient_clip_val", "limit_test_batches", "limit_val_batches", "log_every_n_steps")
FACTORS = ("alpha_init", "alpha_scale", "init_std", "qk_clip", "s_qk_init", "s_qk_scale", "s_uv_init", "s_uv_scale",
           "s_z_init", "s_z_scale", "silu_std")  # fmt: skip
SHARES = (
    "dropout",
    "optimizer.betas.0",
    "optimizer.betas.1",
    "optimizer.momentum",
    "schedule.warmup",
)
RANGES: list[tuple[str, Callable[[float], bool], Iterable[str]]] = [
    ("1 or more", lambda x: x >= 1, [*COUNTS, *BATCHES, *(f"model.{size}" for size in SIZES)]),
    ("0 or more", lambda x: x >= 0, ["data.cache_gb", "data.num_workers", "data.seed", "model.runtime.recompute_every",
                                     "model.schedule.final", "model.z_loss",
                                     *(f"model.{epsilon}" for epsilon in EPSILONS),
                                     *(f"model.optimizer.{rate}" for rate in RATES),
                                     *(f"trainer.{amount}" for amount in AMOUNTS)]),
    ("more than 0", lambda x: x > 0, ["anneal", "trainer.limit_train_batches", "trainer.val_check_interval",
                                      *(f"model.{factor}" for factor in FACTORS)]),
    ("0 to 1", lambda x: 0 <= x <= 1, ["model.schedule.decay"]),
    ("0 or more and less than 1", lambda x: 0 <= x < 1, [f"model.{share}" for share in SHARES]),
    ("more than -1", lambda x: x > -1, ["model.approximation.error"]),
    ("0 to 4294967295", lambda x: 0 <= x < 1 << 32, ["seed_everything"]),
    ("1 or more, or -1 for no limit", lambda x: x >= 1 or x == -1, ["trainer.max_epochs", "trainer.max_steps"]),
    ("1 or more, or -1 for all devices", lambda x: x >= 1 or x == -1, ["trainer.devices"]),
]  # fmt: skip
"""What to give, its condition, and the settings, all finite. Those of one mechanism or one kind of positions its class
checks alone."""
RANGE_OF = {key: (holds, words) for words, holds, keys in RANGES for key in keys}

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]
LONG_NAMES = {
    "None": "32-true",
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
"""Lightning's short names of precisions → its long ones."""


WORDS = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list",
    "tuple": "a list", "dict": "a mapping",
}  # fmt: skip
"""The name of a type → what to give for it."""


def check_ranges(key: str, value: Any) -> None:
    """Raise UserError if `value`, the setting `key`, is a number out of its range, or holds one at any depth: in a
    dataclass, a mapping or a list.

    Of a dataclass, and of the `locals()` of a constructor, None is refused where the annotation does not allow it.
    """
    if is_dataclass(value):
        for field in fields(value):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            if getattr(value, field.name) is None:
                refuse_null(f"{key}.{field.name}", field.type, default)
        value = vars(value)
    elif isinstance(value, Mapping) and inspect.isclass(constructed := value.get("__class__")):
        for parameter in inspect.signature(constructed.__init__).parameters.values():
            if value.get(parameter.name, "") is None:
                refuse_null(f"{key}.{parameter.name}", parameter.annotation, parameter.default)
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, part in value.items():
            check_ranges(f"{key}.{name}", part)
    elif key in RANGE_OF and isinstance(value, int | float) and not isinstance(value, bool):
        holds, words = RANGE_OF[key]
        finite = abs(value) < math.inf
        if not (finite and holds(value)):
            raise UserError(
                f"{key}={value} is out of range: give {'' if finite else 'a finite number, '}{words}"
            )


def check_precision(given: Any) -> Any:
    """The long name of a Trainer's precision. Raises UserError if anlit does not train in it."""
    precision = LONG_NAMES.get(str(given), str(given))
    if precision in ("16-mixed", "16-true"):
        why = "is float16, in which the loss's gradients under 6e-8 become 0: set bf16-mixed or 32-true"
        raise UserError(f"trainer.precision={precision} {why}")
    if precision not in get_args(Precision):
        fix = f"set {', '.join(get_args(Precision))}; float8 is model.init_args.runtime.float8"
        raise UserError(f"trainer.precision={precision} is not one of anlit's: {fix}")
    return precision


def refuse_null(key: str, annotation: Any, default: Any, wanted: str = "") -> None:
    """Raise UserError, which names the default, if a setting of this type takes no null.

    `wanted` is what to give; by default it follows from the annotation.
    """
    if default is None or _takes_null(annotation):
        return
    fix = f"give {wanted or _in_words(annotation)}"
    if default is not inspect.Parameter.empty:
        fix += f"; the default is {_shown_default(default)}"
    raise UserError(f"{key} is empty: {fix}")


def _takes_null(annotation: Any) -> bool:
    if annotation in (inspect.Parameter.empty, Any, object, None, NoneType):
        return True
    if isinstance(annotation, str):  # an annotation that is not evaluated
        return "None" in annotation or "Optional" in annotation
    if get_origin(annotation) in (Union, UnionType):
        return any(_takes_null(member) for member in get_args(annotation))
    return get_origin(annotation) is Literal and None in get_args(annotation)


def _in_words(annotation: Any) -> str:
    """What a setting takes: `true or false or one of auto`."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    kind = get_origin(annotation) or annotation
    return WORDS.get(getattr(kind, "__name__", ""), "its settings")


def _shown_default(default: Any) -> str:
    """A default as YAML has it; for an object the name of its class."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Mapping):
        return str(default.get("class_path", "empty")).rsplit(".", 1)[-1]
    if isinstance(default, tuple):
        return str(list(default))
    if isinstance(default, int | float | str | list):
        return str(default)
    kind = default if isinstance(default, type) else type(default)
    return kind.__name__.removeprefix("LazyInstance_")
