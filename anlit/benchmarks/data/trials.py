"""The single measurements of `anlit benchmark data`, each run in a process of its own.

Our code is imported inside the functions, for `first_batch` to time that.
"""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from anlit.benchmarks.peers.clock import Clock
from anlit.benchmarks.peers.litgpt_data import measure
from anlit.benchmarks.peers.serve import serve

BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
PRIVATE = ("Private_Clean", "Private_Dirty")  # their sum is a process's unique set size
KB = 1024


def bare(input: str, tokenizer: str) -> dict[str, Any]:
    """The tokenizers library alone, in one thread, on texts that are in memory already; the tokens are only counted.

    Args:
        input: folder in SlimPajama's layout.
        tokenizer: folder with a tokenizer.json.
    """
    from anlit.benchmarks.data.texts import read_slimpajama
    from anlit.data.tokenizer import load_tokenizer

    encode = load_tokenizer(Path(tokenizer, "tokenizer.json")).encode_batch
    batches: list[list[str]] = [[]]
    size = 0
    for text in read_slimpajama(Path(input)):
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text.encode("utf-8"))
    clock = Clock()
    tokens = sum(len(encoding) for batch in batches for encoding in encode(batch, add_special_tokens=False))
    result = clock.read()
    documents = sum(map(len, batches))
    return {**result, "tokens": tokens + documents, "documents": documents}  # as if each had its end-of-document token


def prepare(input: str, output: str, tokenizer: str, workers: int) -> dict[str, Any]:
    """Our preparation, from files to shards."""
    from anlit.data.preparation.catalogue import Options, slimpajama
    from anlit.data.preparation.prepare import RunOptions
    from anlit.data.preparation.prepare import prepare as prepare_folder

    clock = Clock()
    recipe = slimpajama(Options(source=input, tokenizer=str(Path(tokenizer, "tokenizer.json"))))
    manifest = prepare_folder(output, recipe, RunOptions(workers=workers))
    result = clock.read()
    assert manifest is not None
    return {**result, "tokens": manifest["tokens"], "documents": manifest["documents"], "bytes": manifest["bytes"]}


def stream(
    path: str, workers: int, batch_size: int, context_length: int, warm_up: float, seconds: float
) -> dict[str, Any]:
    """Our training loader: tokens, targets, documents and positions."""
    with closing(_train_loader(path, workers, batch_size, context_length)) as loader:
        return measure(loader, batch_size * context_length, warm_up, seconds)


def memmap(path: str, batch_size: int, context_length: int, warm_up: float, seconds: float) -> dict[str, Any]:
    """A plain reader in this process: a shuffled list of blocks, each copied out of a mapped file."""
    return measure(_MappedBlocks(path, batch_size, context_length), batch_size * context_length, warm_up, seconds)


def memory(
    path: str, workers: int, batch_size: int, context_length: int, seconds: float, moments: int
) -> dict[str, Any]:
    """Stream without pause and look at each loader process's memory at equally spaced moments.

    Returns:
        Besides the rate, for each process the `megabytes` that only it has, at each moment.
    """
    megabytes: dict[int, list[float]] = {}
    batches = moment = 0
    with closing(_train_loader(path, workers, batch_size, context_length)) as loader:
        clock = Clock()
        for _ in itertools.chain.from_iterable(itertools.repeat(loader)):
            batches += 1
            if time.perf_counter() - clock.begin >= seconds * (moment + 1) / moments:
                moment += 1
                for child in multiprocessing.active_children():
                    megabytes.setdefault(child.pid or 0, []).extend(_megabytes_of(child.pid))
            if moment == moments:
                break
        return {**clock.read(), "tokens": batches * batch_size * context_length, "megabytes": megabytes}


def wait(
    path: str,
    workers: int,
    batch_size: int,
    context_length: int,
    tokens_per_second: float,
    warm_up: float,
    seconds: float,
) -> dict[str, Any]:
    """A device that computes as long with each batch as its rate says, fed by a loop that is one batch ahead of it.

    The loop asks for the next batch when the device begins with the one before; the device waits where that one is not
    there when it is done. Nothing is computed: the processor is free for the loader.

    Returns:
        Besides the rate, `waited`, seconds that the device had nothing to do; `asking`, seconds that the loop spent
        between asking for batches and having them; `longest` of these.
    """
    busy = batch_size * context_length / tokens_per_second
    asking: list[float] = []
    waited = 0.0
    with closing(_train_loader(path, workers, batch_size, context_length)) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        next(batches)
        begin, clock = time.perf_counter(), None
        free = begin
        while clock is None or time.perf_counter() - clock.begin < seconds:
            if clock is None and time.perf_counter() - begin >= warm_up:
                clock, waited = Clock(), 0.0
                asking.clear()
            asked = time.perf_counter()
            next(batches)
            given = time.perf_counter()
            asking.append(given - asked)
            waited += max(0.0, given - free)
            starts = max(free, given)
            free = starts + busy
            time.sleep(max(0.0, starts - time.perf_counter()))
        found = {"waited": waited, "asking": sum(asking), "longest": max(asking)}
        return {**clock.read(), "tokens": len(asking) * batch_size * context_length, **found}


def first_batch(path: str, workers: int, batch_size: int, context_length: int, part: float) -> dict[str, Any]:
    """From nothing to the first batch, at the start or where `part` of an epoch is done.

    Returns:
        `import_seconds` (torch, lightning and our code) and `seconds` (from there to the batch).
    """
    begin = time.perf_counter()
    from anlit.data import TokenShards

    assert TokenShards is not None
    imported = time.perf_counter()
    clock = Clock()
    with closing(_train_loader(path, workers, batch_size, context_length)) as loader:
        state = loader.state_dict()
        loader.load_state_dict({**state, "drawn": int(len(loader) * part) * batch_size})
        batch = next(iter(loader))
        result = clock.read()
    return {**result, "import_seconds": imported - begin, "first_token": int(batch.tokens[0, 0])}


def _train_loader(path: str, workers: int, batch_size: int, context_length: int) -> Any:
    from anlit.data import TokenShards

    data = TokenShards(path, batch_size=batch_size, context_length=context_length, num_workers=workers)
    data.setup("fit")
    return data.train_dataloader()


class _MappedBlocks:
    """Batches of inputs and targets, both (B, T) int64, from the chunks of a prepared folder without subsets."""

    def __init__(self, path: str, batch_size: int, context_length: int) -> None:
        import numpy as np

        from anlit.data.storage.shards import CHUNK_HEADER_BYTES

        self.batch_size, self.length = batch_size, context_length
        self.arrays = [
            np.memmap(chunk, dtype="<u2", mode="r", offset=CHUNK_HEADER_BYTES)
            for chunk in sorted(Path(path, "train").glob("*.bin"))
        ]
        self.places = np.concatenate(
            [
                np.stack([np.full(count, number), np.arange(count) * context_length], axis=1)
                for number, count in enumerate((len(array) - 1) // context_length for array in self.arrays)
            ]
        )
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        import numpy as np
        import torch

        self.rng.shuffle(self.places)
        for first in range(0, len(self.places) - self.batch_size + 1, self.batch_size):
            rows = [
                self.arrays[number][start : start + self.length + 1]
                for number, start in self.places[first : first + self.batch_size].tolist()
            ]
            blocks = torch.from_numpy(np.stack(rows).astype(np.int64))
            yield blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()


def _megabytes_of(pid: int | None) -> list[float]:
    """What only this process has, as Linux tells it; empty for one that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return []
    fields = {name: int(value.split()[0]) * KB / 1e6 for name, value in (line.split(":") for line in lines)}
    return [sum(fields[name] for name in PRIVATE)]


TRIALS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (bare, prepare, stream, memmap, memory, wait, first_batch)
}

if __name__ == "__main__":
    serve(TRIALS)
