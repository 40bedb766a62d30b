"""litgpt's own preparation and data module, timed by the Python of an environment that has litgpt."""

import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .clock import Clock
from .serve import serve

CHUNK_TOKENS = 2049 * 16384  # litgpt's own default for SlimPajama


def prepare(input: str, output: str, tokenizer: str, workers: int) -> dict[str, Any]:
    """`litgpt.data.prepare_slimpajama` with a number of workers of our choice; its own is all cores.

    Args:
        input: folder with .jsonl.zst files. litgpt leaves the subset RedPajamaGithub out.
        output: folder for litdata chunks.
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
    """
    for kind in ("CACHE", "DATA_CACHE"):  # else it leaves folders in /tmp
        os.environ[f"DATA_OPTIMIZER_{kind}_FOLDER"] = f"{output}.{kind.lower()}"
    from litdata.processing.data_processor import DataProcessor
    from litgpt.data.prepare_slimpajama import SlimPajamaDataRecipe
    from litgpt.tokenizer import Tokenizer

    clock = Clock()
    recipe = SlimPajamaDataRecipe(Tokenizer(tokenizer), chunk_size=CHUNK_TOKENS)
    DataProcessor(input_dir=input, output_dir=output, fast_dev_run=False, num_workers=workers, num_downloaders=1).run(
        recipe
    )
    result = clock.read()
    chunks = json.loads(Path(output, "index.json").read_text())["chunks"]
    # A chunk of n documents has n, n + 1 offsets, and for each document its size and its tokens, all of 4 bytes.
    tokens = sum(chunk["chunk_bytes"] // 4 - 2 * (chunk["chunk_size"] + 1) for chunk in chunks)
    return {**result, "tokens": tokens, "documents": sum(chunk["chunk_size"] for chunk in chunks)}


def stream(
    path: str, workers: int, batch_size: int, context_length: int, warm_up: float, seconds: float, as_trained: bool
) -> dict[str, Any]:
    """`litgpt.data.LitData` over a folder of litdata chunks, with its own settings but for the workers.

    Args:
        as_trained: make of each block the inputs and targets that litgpt's training loop makes of it; otherwise
            take the (B, T + 1) uint16 tokens as they come.
    """
    from litgpt.data import LitData

    module = LitData(data_path=path, num_workers=workers)
    module.connect(batch_size=batch_size, max_seq_length=context_length)
    module.prepare_data()
    module.setup()
    batches = module.train_dataloader()
    if as_trained:
        batches = InputsAndTargets(batches, context_length)
    return measure(batches, batch_size * context_length, warm_up, seconds)


class InputsAndTargets:
    """What `litgpt.pretrain` does to a batch before the model sees it."""

    def __init__(self, batches: Any, context_length: int) -> None:
        self.batches, self.length = batches, context_length

    def __iter__(self) -> Iterator[Any]:
        for blocks in self.batches:
            yield blocks[:, : self.length].contiguous().long(), blocks[:, 1 : self.length + 1].contiguous().long()


def measure(batches: Any, tokens_per_batch: int, warm_up: float, seconds: float) -> dict[str, Any]:
    """Take batches for `warm_up` seconds and count those of the next `seconds`, over as many passes as it takes."""
    counted, begin, clock = 0, time.perf_counter(), None
    while True:
        for _ in batches:
            now = time.perf_counter()
            if clock is None:
                if now - begin >= warm_up:
                    clock, counted = Clock(), 0
                continue
            counted += 1
            if now - clock.begin >= seconds:
                return {**clock.read(), "tokens": counted * tokens_per_batch}


def with_versions(trial: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The trial, which tells the versions that it ran with too."""

    def run(**arguments: Any) -> dict[str, Any]:
        versions = {package: version(package) for package in ("litgpt", "litdata", "tokenizers", "torch", "numpy")}
        return {**trial(**arguments), "versions": versions}

    return run


if __name__ == "__main__":
    serve({"prepare": with_versions(prepare), "stream": with_versions(stream)})
