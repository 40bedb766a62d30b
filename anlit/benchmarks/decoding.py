"""`anlit benchmark decoding`: tokens per second of `anlit generate` and memory of its keys and values, by group size.

Models with random weights continue random prompts greedily. A group is the query heads that share a key head. Only
steps after the prompt was read are timed.
"""

import argparse
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from anlit.benchmarks.cases import Case, Group, Ready, Row, beside, measure, milliseconds, notes, quartiles_of, tables
from anlit.benchmarks.options import add_device_options, add_loop_options, device_of, numbers, parser_of
from anlit.benchmarks.our_step import MODELS
from anlit.benchmarks.record import Record
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.errors import UserError
from anlit.inference.generation import Ending, Request, generate
from anlit.inference.sampling import Sampling

SIZE = Size(256, 6, 8, 4096, 2048, 4, torch.float32)
GROUPS = (1, 4)


def build(size: Size, n_tokens: int, device: torch.device, rows: list[Row]) -> Ready:
    """The model of the last row with random weights, in the type of the products."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        decoder: Any = MODELS["GPT"](
            n_layers=size.n_layers, n_heads=size.n_heads, n_kv_heads=size.n_heads // rows[-1]["group"],
            d_model=size.d_model, context_length=size.length, vocab_size=size.vocab_size,
        ).model  # fmt: skip
    decoder.to(device, size.dtype).eval().requires_grad_(False)
    prompts = np.random.default_rng(0).integers(size.vocab_size, size=(size.batch, size.length)).tolist()
    requests = [Request(prompt) for prompt in prompts]

    def turn() -> dict[str, float]:
        times: list[float] = []
        generate(decoder, requests, n_tokens, Sampling(temperature=0), Ending(), size.batch,
                 on_token=lambda number, token: times.append(time.perf_counter()) if number == 0 else None)  # fmt: skip
        return {"step": (times[n_tokens - 1] - times[0]) / (n_tokens - 1)}

    turn()
    held = size.batch * decoder.cache_bytes(size.length + n_tokens, size.dtype.itemsize)
    return Ready(turn, {"cache_bytes": held})


def main(argv: list[str]) -> int:
    """`anlit benchmark decoding`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    device = device_of(given)
    if device.type == "cuda" and not given.dtype:
        given.dtype = "bfloat16"
    size = changed_size(SIZE, given)
    if any(group < 1 or size.n_heads % group for group in given.groups):
        raise UserError(f"--groups must be divisors of the {size.n_heads} heads, such as 1,{size.n_heads}")
    if given.tokens < 2:
        raise UserError(f"--tokens {given.tokens} must be at least 2")
    record = Record("decoding", argv, given.output, device, size=size.as_json(), tokens=given.tokens)
    cases = [
        Case("a key for every head" if group == 1 else f"groups of {group}",
             partial(build, size, given.tokens, device), {"group": group})
        for group in given.groups
    ]  # fmt: skip
    measure([Group(f"Generating, GPT+, {size.n_heads} heads, {size.title}", cases)], record, given.rounds,
            given.minutes)  # fmt: skip
    columns = {
        "keys and values, MB": lambda row: f"{row['cache_bytes'] / 1e6:.1f}",
        "tokens/s": lambda row: f"{size.batch / row['seconds']['step']['median']:,.0f}",
        "step, ms": milliseconds("step"),
        "quartiles": quartiles_of("step"),
        "÷ first (95 %)": beside("step"),
    }
    record.finish(tables(record, columns), notes(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("decoding", __doc__, "--groups 1,4 --length 1024 --batch 8")
    add_device_options(parser)
    add = parser.add_argument
    add("--groups", type=numbers, default=GROUPS, metavar="1,…", help="heads of queries that share a key head (1,4)")
    add("--tokens", type=int, default=64, help="tokens that each row of the batch gets in a turn (%(default)s)")
    add_size_options(parser)
    add_loop_options(parser, 10)
    return parser
