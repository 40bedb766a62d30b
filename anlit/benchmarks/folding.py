"""`anlit benchmark folding`: forward time of nGPT and anGPT, folded and not, beside GPT+'s."""

import argparse
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anlit.benchmarks.options import add_device_options, device_of, parser_of
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.turns import alternate, paired_ratio, quartiles, timed
from anlit.models import GPT, NGPT, AnGPT
from anlit.models.fold import fold
from anlit.models.runtime import Runtime

BASE = "GPT+"
WARM_UP = 3
HEADINGS = ("model", "ms (median)", "quartiles", "÷ GPT+ (95 %)")


def decoders(size: dict[str, Any], device: torch.device, dtype: torch.dtype, compiled: bool) -> dict[str, nn.Module]:
    """The three architectures with random weights, nGPT and anGPT folded too."""
    warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`.*")
    models: dict[str, Any] = {BASE: GPT(**size).model}
    for name, architecture in (("nGPT", NGPT), ("anGPT", AnGPT)):
        models[name] = architecture(**size).model
        models[f"{name}, folded"] = fold(models[name])
    for model in models.values():
        model.to(device, dtype).eval().requires_grad_(False)
        if compiled:
            Runtime(compile=True).apply(model, device.type)
    return models


@torch.inference_mode()
def measure(models: dict[str, nn.Module], tokens: Tensor, rounds: int) -> dict[str, dict[str, Any]]:
    """By name, the quartiles of a forward pass's seconds, and their paired ratio to GPT+'s."""
    calls = {name: timed(partial(model, tokens), tokens.device) for name, model in models.items()}
    seconds = alternate(calls, rounds, WARM_UP)
    return {
        name: {**quartiles(values), "beside_base": paired_ratio(seconds, name, BASE)._asdict()}
        for name, values in seconds.items()
    }


def main(argv: list[str]) -> int:
    """`anlit benchmark folding`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    device = device_of(given)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = {
        "n_layers": given.layers,
        "n_heads": given.heads,
        "d_model": given.width,
        "context_length": given.length,
        "vocab_size": given.vocab,
    }
    settings = {"size": size, "batch": given.batch, "dtype": str(dtype), "compiled": given.compile}
    record = Record("folding", argv, given.output, device, **settings)
    tokens = torch.randint(given.vocab, (given.batch, given.length), device=device)
    record.keep(models=measure(decoders(size, device, dtype, given.compile), tokens, given.rounds))
    rows = [[name, *_cells(one)] for name, one in record.values["models"].items()]
    record.finish([Table(f"Forward pass of {given.batch} × {given.length} tokens, {dtype}", HEADINGS, rows)])
    return 0


def _cells(one: dict[str, Any]) -> list[str]:
    low, high = one["quartiles"]
    beside = one["beside_base"]
    interval = f"{beside['median']:.3f} ({beside['low']:.3f} – {beside['high']:.3f})"
    return [f"{1e3 * one['median']:.2f}", f"{1e3 * low:.2f} – {1e3 * high:.2f}", interval]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("folding", __doc__, "--layers 4 --width 256 --heads 4 --length 256 --vocab 4096")
    add_device_options(parser)
    add = parser.add_argument
    for name, value in (("layers", 12), ("heads", 12), ("width", 768), ("length", 1024), ("vocab", 50_304)):
        add(f"--{name}", type=int, default=value, help="(%(default)s)")
    add("--batch", type=int, default=1, help="sequences (%(default)s)")
    add("--rounds", type=int, default=20, help="forward passes of each (%(default)s)")
    add("--compile", action="store_true", help="compiled blocks")
    return parser
