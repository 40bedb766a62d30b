"""`anlit benchmark folding`: the forward time of nGPT and anGPT, folded and not, compared with GPT+.

On a GPU the blocks are compiled.
"""

import argparse
import warnings
from functools import partial
from typing import Any

import torch

from anlit.benchmarks.cases import Case, Group, Ready, Row, beside, measure, milliseconds, notes, quartiles_of, tables
from anlit.benchmarks.options import add_device_options, add_loop_options, device_of, parser_of
from anlit.benchmarks.our_step import MODELS
from anlit.benchmarks.peers.clock import seconds_of
from anlit.benchmarks.rates import prepare_compiler
from anlit.benchmarks.record import Record
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.models.fold import fold
from anlit.models.runtime import Runtime

SIZE = Size(768, 12, 12, 50_304, 1024, 1, torch.float32)
WARM_UP = 3


def build(size: Size, device: torch.device, rows: list[Row]) -> Ready:
    """The decoder of the last row with random weights, in the data type of `size`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        decoder: Any = MODELS[rows[-1]["model"]](
            n_layers=size.n_layers, n_heads=size.n_heads, d_model=size.d_model, context_length=size.length,
            vocab_size=size.vocab_size,
        ).model  # fmt: skip
    if rows[-1]["folded"]:
        decoder = fold(decoder)
    decoder.to(device, size.dtype).eval().requires_grad_(False)
    Runtime(compile=device.type == "cuda").apply(decoder, device.type)
    tokens = torch.randint(size.vocab_size, (size.batch, size.length), device=device)

    @torch.inference_mode()
    def forward() -> None:
        decoder(tokens)

    seconds_of(forward, device, WARM_UP)
    return Ready(lambda: {"forward": seconds_of(forward, device)})


def main(argv: list[str]) -> int:
    """`anlit benchmark folding`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    device = device_of(given)
    if device.type == "cuda" and not given.dtype:
        given.dtype = "bfloat16"
    size = changed_size(SIZE, given)
    record = Record("folding", argv, given.output, device, size=size.as_json())
    prepare_compiler()
    models = (("GPT+", "GPT", False), *((f"{name}{', folded' * folded}", name, folded)
              for name in ("nGPT", "anGPT") for folded in (False, True)))  # fmt: skip
    cases = [
        Case(label, partial(build, size, device), {"model": model, "folded": folded}) for label, model, folded in models
    ]
    measure([Group(f"Forward pass, {size.title}", cases)], record, given.rounds, given.minutes)
    columns = {"ms (median)": milliseconds("forward"), "quartiles": quartiles_of("forward"),
               "÷ GPT+ (95 %)": beside("forward")}  # fmt: skip
    record.finish(tables(record, columns), notes(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("folding", __doc__, "--n_layers 4 --d_model 256 --n_heads 4 --length 256 --vocab_size 4096")
    add_device_options(parser)
    add_size_options(parser)
    add_loop_options(parser, 20)
    return parser
