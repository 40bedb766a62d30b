"""The single measurements of `anlit benchmark data`. Each runs in a separate process."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from anlit.benchmarks.peers.serve import serve
from anlit.data import TokenShards
from anlit.data.preparation.catalogue import Options, python_files, python_sources
from anlit.data.preparation.prepare import RunOptions
from anlit.data.preparation.prepare import prepare as prepare_folder
from anlit.data.tokenizer import load_tokenizer

BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
WARM_UP = 1.0


class Clock:
    """Wall time, and processor time of this process and of its finished children."""

    def __init__(self) -> None:
        self.begin, self.times = time.perf_counter(), os.times()

    def read(self, tokens: int) -> dict[str, float]:
        """Seconds per token."""
        seconds = time.perf_counter() - self.begin
        return {"token": seconds / tokens, "processor": (sum(os.times()[:4]) - sum(self.times[:4])) / tokens}


def texts() -> Iterator[str]:
    """The documents of PythonSources: the distinct UTF-8 sources of the interpreter."""
    seen = set()
    for path in python_files(include_site_packages=False).values():
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text and text not in seen:
            seen.add(text)
            yield text


def bare(tokenizer: str) -> dict[str, float]:
    """The tokenizers library alone, in one thread, on texts in memory. It only counts the tokens."""
    encode = load_tokenizer(tokenizer).encode_batch
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts():
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text.encode("utf-8"))
    clock = Clock()
    tokens = sum(len(encoding) for batch in batches for encoding in encode(batch, add_special_tokens=False))
    return clock.read(tokens + sum(map(len, batches)))  # as if each document had its end-of-document token


def prepare(output: str, tokenizer: str, workers: int) -> dict[str, float]:
    """Our preparation, from files to shards."""
    clock = Clock()
    recipe = replace(python_sources(Options()), tokenizer=tokenizer)
    manifest = prepare_folder(output, recipe, RunOptions(workers=workers))
    assert manifest is not None
    return clock.read(manifest["tokens"])


def stream(path: str, workers: int, batch_size: int, length: int, seconds: float) -> dict[str, float]:
    """Our training loader: tokens, targets, documents and positions."""
    data = TokenShards(path, batch_size=batch_size, context_length=length, num_workers=workers)
    data.setup("fit")
    with closing(data.train_dataloader()) as loader:
        return rate_of(loader, batch_size * length, seconds)


def litdata(path: str, workers: int, batch_size: int, length: int, seconds: float) -> dict[str, float]:
    """litdata's own loader over the same shards: blocks (B, T + 1) of uint16."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(Path(path, "train")), item_loader=TokensLoader(length + 1), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)
    return rate_of(loader, batch_size * length, seconds)


def rate_of(batches: Any, tokens: int, seconds: float) -> dict[str, float]:
    """Take batches until the warm-up is over, and count those of the next `seconds`, over several passes if needed."""
    counted, begin, clock = 0, time.perf_counter(), None
    while True:
        for _ in batches:
            now = time.perf_counter()
            if clock is None:
                if now - begin >= min(WARM_UP, seconds):
                    clock = Clock()
                continue
            counted += 1
            if now - clock.begin >= seconds:
                return clock.read(counted * tokens)


if __name__ == "__main__":
    serve({function.__name__: function for function in (bare, prepare, stream, litdata)})
