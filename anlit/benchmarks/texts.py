"""Text for the benchmarks: the Python sources of this machine, written out in SlimPajama's layout."""

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import zstandard

MB = 1_000_000
FILE_MEGABYTES = 45  # text in one of the hub's files, before compression
CHUNKS = {"train": 10, "validation": 5, "test": 5}  # folders that the hub spreads a split's files over
STEMS = {"train": "example_train", "validation": "example_holdout", "test": "example_holdout"}
SET_NAMES = (
    "RedPajamaCommonCrawl",
    "RedPajamaC4",
    "RedPajamaGithub",
    "RedPajamaBook",
    "RedPajamaArXiv",
    "RedPajamaWikipedia",
    "RedPajamaStackExchange",
)


def slimpajama_path(folder: Path, split: str, number: int) -> Path:
    """Where the hub has a split's file: they are spread over chunk1, chunk2, …, and numbered anew in each."""
    chunk, index = number % CHUNKS[split] + 1, number // CHUNKS[split]
    return folder / split / f"chunk{chunk}" / f"{STEMS[split]}_{index}.jsonl.zst"


def write_slimpajama_file(path: Path, rows: Iterable[tuple[str, str]], frames: int = 1) -> None:
    """One .jsonl.zst file of (text, redpajama_set_name).

    Args:
        frames: how many zstd frames the rows are cut into; a reader must go on after the first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        # JSON may spell a letter out or escape it: every second row has escapes.
        json.dumps({"text": text, "meta": {"redpajama_set_name": name}}, ensure_ascii=bool(number % 2)) + "\n"
        for number, (text, name) in enumerate(rows)
    ]
    cut = -(-len(lines) // frames) or 1
    compressor = zstandard.ZstdCompressor()
    with path.open("wb") as file:
        for start in range(0, max(1, len(lines)), cut):
            file.write(compressor.compress("".join(lines[start : start + cut]).encode("utf-8")))


def python_sources_as_slimpajama(
    folder: Path, megabytes: float, set_names: Sequence[str] = SET_NAMES, file_megabytes: float = FILE_MEGABYTES
) -> dict[str, dict[str, int]]:
    """Write *.py of the interpreter and its packages as SlimPajama: a train split and two small held-out ones.

    Every fiftieth document goes to validation, the one after it to test. Where the machine has too
    little text, it is repeated with a first line that tells the repetitions apart.

    Args:
        megabytes: text in the three splits together, in 10⁶ UTF-8 bytes.
        set_names: the subsets, given to the documents in turn.
        file_megabytes: text in one file.

    Returns:
        For each split its documents, UTF-8 bytes and files.
    """
    counts = {split: {"documents": 0, "bytes": 0, "files": 0} for split in CHUNKS}
    waiting: dict[str, list[tuple[str, str]]] = {split: [] for split in CHUNKS}
    sizes = dict.fromkeys(CHUNKS, 0)

    def write(split: str) -> None:
        write_slimpajama_file(slimpajama_path(folder, split, counts[split]["files"]), waiting[split])
        counts[split]["files"] += 1
        waiting[split], sizes[split] = [], 0

    total = 0
    for number, text in enumerate(_python_texts()):
        split = {0: "validation", 1: "test"}.get(number % 50, "train")
        size = len(text.encode("utf-8"))
        waiting[split].append((text, set_names[number % len(set_names)]))
        sizes[split] += size
        counts[split]["documents"] += 1
        counts[split]["bytes"] += size
        total += size
        if sizes[split] >= file_megabytes * MB:
            write(split)
        if total >= megabytes * MB and number >= 2:
            break
    for split in CHUNKS:
        if waiting[split]:
            write(split)
    return counts


def _python_texts() -> Iterator[str]:
    """Different non-empty UTF-8 sources, over and over; from the second time on with a distinguishing line."""
    paths = sysconfig.get_paths()
    folders = sorted({paths["stdlib"], paths["purelib"], paths["platlib"]})
    for repetition in itertools.count(1):
        seen = set()
        for path in itertools.chain.from_iterable(sorted(Path(folder).rglob("*.py")) for folder in folders):
            try:
                text = path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode("utf-8")).digest()
            if text and digest not in seen:
                seen.add(digest)
                yield text if repetition == 1 else f"# repetition {repetition}\n{text}"


def slimpajama_texts(folder: Path) -> Iterator[str]:
    """All documents of a folder in SlimPajama's layout, file by file."""
    for path in sorted(folder.rglob("*.jsonl.zst")):
        with path.open("rb") as file:
            lines = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read().split(b"\n")
        yield from (json.loads(line)["text"] for line in lines if line)
