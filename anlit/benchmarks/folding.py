"""`anlit benchmark folding`: forward time of nGPT and anGPT, folded and not, beside GPT+'s."""

import argparse
import shlex
import time
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from anlit import GPT, NGPT, AnGPT
from anlit.benchmarks.record import spread
from anlit.checkpoints.loading import find_device
from anlit.evaluation.report import device_name
from anlit.models.fold import fold
from anlit.models.runtime import Runtime
from anlit.reporting.files import output_folder, write_json
from anlit.reporting.provenance import environment

BASE = "GPT+"
WARM_UP = 3


@torch.inference_mode()
def forward_seconds(decoders: dict[str, nn.Module], tokens: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each forward pass of each decoder, (rounds,), one after the other in every round.

    Args:
        decoders: On the device of `tokens`.
        tokens: (B, T).
        rounds: After three that are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for number in range(WARM_UP + rounds):
        for name, decoder in decoders.items():
            _wait(tokens.device)
            start = time.perf_counter()
            decoder(tokens)
            _wait(tokens.device)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decoders(size: dict[str, int], device: torch.device, dtype: torch.dtype, compiled: bool) -> dict[str, nn.Module]:
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


def measure(size: dict[str, int], batch: int, rounds: int, device: torch.device, compiled: bool) -> dict[str, Any]:
    """The record: by name, the spread of the seconds and their median over GPT+'s; bf16 on CUDA, else float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = torch.randint(size["vocab_size"], (batch, size["context_length"]), device=device)
    seconds = forward_seconds(decoders(size, device, dtype, compiled), tokens, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    for one in found.values():
        one["relative"] = one["median"] / found[BASE]["median"]
    return {"size": size, "batch": batch, "dtype": str(dtype), "compiled": compiled, "seconds": found}


def main(argv: list[str]) -> int:
    """`anlit benchmark folding`; returns the exit status and raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="anlit benchmark folding", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    for name, value in (("layers", 12), ("heads", 12), ("width", 768), ("length", 1024), ("vocab", 50_304)):
        add(f"--{name}", type=int, default=value)
    add("--batch", type=int, default=1, help="sequences")
    add("--rounds", type=int, default=20, help="forward passes of each")
    add("--device", default="auto", help="a torch device")
    add("--compile", action="store_true", help="compiled blocks")
    add("--output", metavar="DIR", help="write folding.json there")
    arguments = parser.parse_args(argv)
    record = {"command": shlex.join(["anlit", "benchmark", "folding", *argv]), **environment()}
    device = find_device(arguments.device)
    size = {
        "n_layers": arguments.layers,
        "n_heads": arguments.heads,
        "d_model": arguments.width,
        "context_length": arguments.length,
        "vocab_size": arguments.vocab,
    }
    record |= {"device": device_name(device)}
    record |= measure(size, arguments.batch, arguments.rounds, device, arguments.compile)
    table = Table("model", "milliseconds (median)", "fastest", "relative to GPT+")
    for name, one in record["seconds"].items():
        table.add_row(name, f"{1e3 * one['median']:.2f}", f"{1e3 * one['min']:.2f}", f"{one['relative']:.3f}")
    Console().print(table)
    if arguments.output:
        write_json(output_folder(arguments.output) / "folding.json", record)
    return 0
