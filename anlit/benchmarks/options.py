"""Options that benchmarks share, the mechanisms that they name, and the shapes of a model and its batch."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anlit import ALiBi, LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.config.options import ToolParser, at_least
from anlit.errors import UserError
from anlit.nn.mechanisms.mechanism import Mechanism

MECHANISMS: dict[str, Mechanism] = {
    "plain": Plain(),
    "log-n": LogN(learned="never"),
    "scale-invariant": ScaleInvariant(),
    "scale-invariant-learned": ScaleInvariant(learned="per_layer"),
    "log-bias": LogBias(),
    "alibi": ALiBi(),
    "window": SlidingWindow(1024),
    "window-scale-invariant": SlidingWindow(1024, ScaleInvariant()),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser_of(
    name: str, description: str | None, example: str, presets: Collection[str] = ()
) -> ToolParser:
    """A parser with the options that all benchmarks share and, if there are presets, --preset."""
    parser = ToolParser(
        prog=f"anlit benchmark {name}",
        description=description,
        epilog=f"Example: anlit benchmark {name} {example}",
    )
    add = parser.add_argument
    add("--output", default="runs/benchmark", help="folder for what it writes (%(default)s)")
    if presets:
        here = "h200" if torch.cuda.is_available() else "cpu"
        add("--preset", choices=list(presets), default=here, help="what to measure (%(default)s)")
    add("--device", help="a torch device (a GPU where there is one)")
    add("--threads", type=at_least(1), help="processor threads (torch's own number)")
    add("--rounds", type=at_least(1), help="number of rounds")
    add(
        "--minutes",
        type=at_least(0, float),
        default=7.5,
        help="start nothing new after this time (%(default)s)",
    )
    return parser


def parse(
    parser: ToolParser, argv: Sequence[str], presets: Mapping[str, Mapping[str, Any]] = {}
) -> argparse.Namespace:
    """The options; those that are left out are the preset's. The number of threads is set. `device` is the given one,
    else that of the preset, else a GPU if there is one. Raises UserError if this machine does not have it."""
    given, has_gpu = parser.parse_args(argv), torch.cuda.is_available()
    if presets:
        parser.set_defaults(**presets[given.preset])
        given = parser.parse_args(argv)
    on_cpu = given.preset == "cpu" if presets else not has_gpu
    device = torch.device(given.device or ("cpu" if on_cpu else "cuda"))
    if device.type == "cuda" and not has_gpu:
        what = f"--device {given.device}" if given.device else f"--preset {given.preset}"
        raise UserError(f"{what} needs a CUDA device, and there is none: choose the CPU")
    if given.threads:
        torch.set_num_threads(given.threads)
    given.device = device
    return given


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option: `a,b` → ("a", "b"), each of them known."""

    def read(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name} is not known: choose from {', '.join(known)}"
                )
        return tuple(text.split(","))

    return read


class Size(NamedTuple):
    """The shapes of a model and its batch. The MLP is 4·d wide; embedding and head are separate.

    `length` is T, the tokens in a sequence; `dtype` that of products: float32, or bfloat16 under autocast with float32
    parameters.
    """

    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    length: int
    batch: int
    dtype: str

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Size":
        return cls(*(getattr(given, name) for name in cls._fields))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        shape = f"d {self.d_model}, L {self.n_layers}, T {self.length}, B {self.batch}, V {self.vocab_size}"
        return f"{shape}, {self.dtype}"

    def at_length(self, length: int) -> "Size":
        """Sequences of another length, as many as hold the tokens of this batch, or one."""
        return self._replace(length=length, batch=max(1, self.batch * self.length // length))


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """An option for each number of a `Size`, and --dtype."""
    for name in Size._fields[:-1]:
        parser.add_argument(
            f"--{name}", type=at_least(1), metavar="N", help="replaces the built-in one"
        )
    parser.add_argument("--dtype", choices=list(DTYPES), help="replaces the built-in one")
