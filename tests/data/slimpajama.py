"""Much text: the Python sources of this machine, written out in SlimPajama's layout."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import zstandard

from anlit.data.preparation.catalogue import python_files

MB = 1_000_000
SUBSETS = ("RedPajamaCommonCrawl", "RedPajamaC4", "RedPajamaBook", "RedPajamaArXiv")
"""Of the corpus's seven."""
HELD_OUT = 50
"""Every so manieth document is for validation."""


def write_slimpajama(folder: Path, megabytes: float, file_megabytes: float) -> dict[str, int]:
    """Write *.py of the interpreter and its packages as SlimPajama's train and validation split.

    Where the machine has too little text, it is repeated with a first line that tells the repetitions apart.

    Args:
        folder: For train/chunk1/example_train_0.jsonl.zst and so on.
        megabytes: Text in both splits together, in 10⁶ UTF-8 bytes.
        file_megabytes: Text in one file.

    Returns:
        `documents` and `bytes`.
    """
    written = {"documents": 0, "bytes": 0}
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    sizes = dict.fromkeys(rows, 0)
    numbers = {split: itertools.count() for split in rows}

    def write(split: str) -> None:
        path = folder / split / "chunk1" / f"example_{split}_{next(numbers[split])}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.ZstdCompressor().compress("".join(rows[split]).encode("utf-8")))
        rows[split], sizes[split] = [], 0

    for number, text in enumerate(_python_texts()):
        split = "validation" if number % HELD_OUT == 0 else "train"
        size = len(text.encode("utf-8"))
        row = {"text": text, "meta": {"redpajama_set_name": SUBSETS[number % len(SUBSETS)]}}
        rows[split].append(json.dumps(row) + "\n")
        sizes[split] += size
        written["documents"] += 1
        written["bytes"] += size
        if sizes[split] >= file_megabytes * MB:
            write(split)
        if written["bytes"] >= megabytes * MB and number >= 1:
            break
    for split in rows:
        if rows[split]:
            write(split)
    return written


def _python_texts() -> Iterator[str]:
    """Different non-empty UTF-8 sources, over and over; from the second time on with a distinguishing line."""
    paths = list(python_files(include_site_packages=True).values())
    for repetition in itertools.count(1):
        seen = set()
        for path in paths:
            try:
                text = path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text and text not in seen:
                seen.add(text)
                yield text if repetition == 1 else f"# repetition {repetition}\n{text}"
