"""Options of all benchmarks, the mechanisms that they name, the shapes of a model and a batch."""

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
OF_PRESET = "the preset's"
"""What --help says of a default that a preset sets."""
OWN_DEFAULT = "%(default)s"
"""The same of a default of the parser, which argparse fills in."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def benchmark_parser(
    name: str, description: str | None, example: str, presets: Collection[str] = ()
) -> ToolParser:
    """Return a parser with the options of all benchmarks and, if there are presets, --preset."""
    parser = ToolParser(
        prog=f"anlit benchmark {name}",
        description=description,
        epilog=f"Example: anlit benchmark {name} {example}",
    )
    add = parser.add_argument
    add("--output", default="runs/benchmark", help="folder for the results (%(default)s)")
    if presets:
        preset = "h200" if torch.cuda.is_available() else "cpu"
        add("--preset", choices=list(presets), default=preset, help="what to measure (%(default)s)")
    add("--device", help="a torch device (a GPU if there is one)")
    add("--threads", type=at_least(1), help="processor threads (torch's own number)")
    rounds = OF_PRESET if presets else OWN_DEFAULT
    add("--rounds", type=at_least(1), help=f"number of rounds ({rounds})")
    limit = "minutes after which nothing new starts (%(default)s)"
    add("--minutes", type=at_least(0, float), default=7.5, help=limit)
    return parser


def parse(
    parser: ToolParser, argv: Sequence[str], presets: Mapping[str, Mapping[str, Any]] = {}
) -> argparse.Namespace:
    """Parse the options, complete them by the preset, and set the number of threads.

    `device` becomes a torch.device, by default the preset's. Without presets it is a GPU if there
    is a GPU. UserError if this machine does not have it.
    """
    options = parser.parse_args(argv)
    if presets:
        parser.set_defaults(**presets[options.preset])
        options = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    is_for_cpu = options.preset == "cpu" if presets else not has_gpu
    device = torch.device(options.device or ("cpu" if is_for_cpu else "cuda"))
    if device.type == "cuda" and not has_gpu:
        is_named = options.device is not None
        option = f"--device {options.device}" if is_named else f"--preset {options.preset}"
        raise UserError(f"{option} needs a CUDA device, and there is none: choose the CPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.device = device
    return options


def comma_separated(choices: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option that takes some of the choices: `a,b` → ("a", "b")."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"{name} is not known: choose from {', '.join(choices)}"
                )
        return names

    return read


class Size(NamedTuple):
    """The shapes of a model and its batch. The MLP is 4·d wide; embedding and head are separate.

    `length` is T, the tokens in a sequence. `dtype` belongs to matrix products: float32, or
    bfloat16 under autocast with float32 parameters.
    """

    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    length: int
    batch: int
    dtype: str

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "Size":
        return cls(*(getattr(options, name) for name in cls._fields))

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences of a batch, and tokens of a sequence."""
        return self.batch, self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        model = f"d {self.d_model}, L {self.n_layers}"
        batch = f"T {self.length}, B {self.batch}"
        return f"{model}, {batch}, V {self.vocab_size}, {self.dtype}"

    def at_length(self, length: int) -> "Size":
        """Return a batch with as many tokens in sequences of another length."""
        return self._replace(length=length, batch=max(1, self.batch * self.length // length))


SIZES = {
    "d_model": "width of the hidden state",
    "n_layers": "blocks",
    "n_heads": "attention heads",
    "vocab_size": "tokens of the vocabulary",
    "length": "tokens in a sequence",
    "batch": "sequences in a batch",
}
"""Number of a `Size` → what it counts."""


def add_size_options(parser: argparse.ArgumentParser, default: str, dtype: str) -> None:
    """Add an option for each number of a `Size`, and --dtype.

    Args:
        default: What --help says of the numbers' defaults: `OF_PRESET` or `OWN_DEFAULT`.
        dtype: What --help says of the default of --dtype.
    """
    *numbers, _ = Size._fields
    for name in numbers:
        text = f"{SIZES[name]} ({default})"
        parser.add_argument(f"--{name}", type=at_least(1), metavar="N", help=text)
    text = f"precision of the matrix products ({dtype})"
    parser.add_argument("--dtype", choices=list(DTYPES), help=text)
