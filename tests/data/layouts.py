"""Files in the hub's layouts and schemas, written without the package's own writers and readers."""

import itertools
import json
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

SET_NAMES = (
    "RedPajamaCommonCrawl",
    "RedPajamaC4",
    "RedPajamaGithub",
    "RedPajamaBook",
    "RedPajamaArXiv",
    "RedPajamaWikipedia",
    "RedPajamaStackExchange",
)
CHUNKS = {"train": 10, "validation": 5, "test": 5}  # folders that the hub spreads a split's files over
STEMS = {"train": "example_train", "validation": "example_holdout", "test": "example_holdout"}
LONG = 1_100_000  # bytes of the long document, at least
END_OF_DOCUMENT = "<|endoftext|>"
GPT2_END_OF_DOCUMENT = 50256
BIN_MAGIC, BIN_VERSION = 20240520, 1

PIECES = (
    "the norm of a row is one",
    "größer, naïve, œuvre, Łódź",
    "Быстрая лиса и ёж",
    "Η γρήγορη αλεπού, ᾧ",
    "素早い茶色の狐。カタカナ",
    "敏捷的棕色狐狸，龍",
    "빠른 갈색 여우",
    "الثعلب البني السريع ١٢٣",
    "שועל חום מהיר",
    "तेज़ भूरी लोमड़ी क्ष",
    "สุนัขจิ้งจอก",
    "e\u0301 a\u0308\u0323 Z̷̢͘ạ̵lgo",  # combining marks
    "🙂 👩🏽\u200d🚀 🇩🇪 👨\u200d👩\u200d👧\u200d👦",  # joined emoji
    "line one\r\nline two\r\n\tindented\n\n\n",
    "zero\u200bwidth\u200c\ufeffmarks\u2060 and\u00a0no\u202fbreak",
    "\x00\x01\x07\x08\x0b\x0c\x1b[31m\x7f\x85",  # control characters
    "\u2028line and paragraph\u2029separators",  # JSON allows them raw; str.splitlines() cuts at them
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎 \U0010fffd",  # outside the basic plane
    'quotes " \\ / and {"text": "json"}',
    "def f(x):\n    return x ** 2  # code\n",
    "right\u202eto\u202cleft",
    f"says {END_OF_DOCUMENT} in the middle",
    "trailing spaces   \n ",
)
FIRST = (
    f"a text that says {END_OF_DOCUMENT} and goes on",
    "x",
    "\n",
    "é",
    "🙂",
    "\x00",
    "\ufeff",
    " leading and trailing space ",
)


def documents(n: int, seed: int = 0) -> Iterator[str]:
    """`n` texts, all different from "": first the odd ones of `FIRST`, then a long one, then mixtures of `PIECES`.

    The same arguments give the same texts; the mixtures of two seeds differ.
    """
    rng = random.Random(seed)
    for number in range(n):
        if number < len(FIRST):
            yield FIRST[number]
        elif number == len(FIRST):
            yield _mixture(rng, LONG)
        else:
            yield f"{number} of {seed}: {_mixture(rng, rng.randrange(1, 3000))}"


def _mixture(rng: random.Random, size: int) -> str:
    """Pieces until there are at least `size` UTF-8 bytes."""
    parts: list[str] = []
    while size > 0:
        parts.append(rng.choice(PIECES) + rng.choice((" ", "\n", "")))
        size -= len(parts[-1].encode("utf-8"))
    return "".join(parts)


def slimpajama(folder: Path, documents_by_split: dict[str, Sequence[str]], n_files: int = 2) -> list[Path]:
    """cerebras/SlimPajama-627B: train/chunk1/example_train_0.jsonl.zst, …, validation/…, test/….

    Document i of a split is of subset `SET_NAMES[i % 7]`. A split's documents are cut into runs of
    nearly equal length, one for each file in the order of the returned paths. Every second file has
    several zstd frames.

    Args:
        documents_by_split: texts for any of "train", "validation", "test".
        n_files: files for each split.

    Returns:
        The files, split by split.
    """
    written = []
    for split, texts in documents_by_split.items():
        rows = [(text, SET_NAMES[number % len(SET_NAMES)]) for number, text in enumerate(texts)]
        for number, part in enumerate(_cut(rows, n_files)):
            chunk, index = number % CHUNKS[split] + 1, number // CHUNKS[split]
            written.append(folder / split / f"chunk{chunk}" / f"{STEMS[split]}_{index}.jsonl.zst")
            _write_slimpajama_file(written[-1], part, frames=1 + 2 * (number % 2))
    return written


def _write_slimpajama_file(path: Path, rows: Sequence[tuple[str, str]], frames: int) -> None:
    """(text, redpajama_set_name) as JSON lines, cut into so many zstd frames: a reader must go on after the first."""
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


def openwebtext(folder: Path, texts: Sequence[str], n_files: int = 2, row_group_size: int = 10) -> list[Path]:
    """Skylion007/openwebtext: plain_text/train-00000-of-00080.parquet, …, with one column of text.

    Returns:
        The files, with the texts in order.
    """
    written = []
    for number, part in enumerate(_cut(texts, n_files)):
        written.append(folder / "plain_text" / f"train-{number:05d}-of-00080.parquet")
        _write_parquet(written[-1], pa.table({"text": pa.array(part, pa.string())}), row_group_size)
    return written


def fineweb(
    folder: Path, texts: Sequence[str], n_files: int = 2, row_group_size: int = 10, sample: str = "10BT"
) -> list[Path]:
    """HuggingFaceFW/fineweb: sample/10BT/000_00000.parquet, …, with the nine columns of the hub.

    Returns:
        The files, with the texts in order.
    """
    written = []
    for number, part in enumerate(_cut(texts, n_files)):
        written.append(folder / "sample" / sample / f"{number:03d}_00000.parquet")
        dump, names = "CC-MAIN-2013-20", [f"{number}/{row}" for row in range(len(part))]
        columns: dict[str, tuple[list, pa.DataType]] = {
            "text": (list(part), pa.string()),
            "id": ([f"<urn:uuid:{name}>" for name in names], pa.string()),
            "dump": ([dump] * len(part), pa.string()),
            "url": ([f"http://example.org/{name}" for name in names], pa.string()),
            "date": (["2013-05-18T05:48:54Z"] * len(part), pa.string()),
            "file_path": ([f"s3://commoncrawl/crawl-data/{dump}/{name}.warc.gz" for name in names], pa.string()),
            "language": (["en"] * len(part), pa.string()),
            "language_score": ([0.9] * len(part), pa.float64()),
            "token_count": ([len(text.split()) for text in part], pa.int64()),
        }
        table = pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})
        _write_parquet(written[-1], table, row_group_size)
    return written


def fineweb_bin(folder: Path, token_documents: Sequence[Sequence[int]], tokens_per_file: int) -> list[Path]:
    """kjj0/fineweb10B-gpt2: fineweb_val_000000.bin, fineweb_train_000001.bin, ….

    One stream, each document after its token 50256, cut every `tokens_per_file` tokens, in the middle of
    documents too; the last file may be shorter.

    Returns:
        The files in the order of the stream.
    """
    stream = array("H")
    for document in token_documents:
        stream.extend([GPT2_END_OF_DOCUMENT, *document])
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, start in enumerate(range(0, len(stream), tokens_per_file)):
        tokens = stream[start : start + tokens_per_file]
        written.append(folder / f"fineweb_{'train' if number else 'val'}_{number:06d}.bin")
        header = struct.pack("<256i", BIN_MAGIC, BIN_VERSION, len(tokens), *[0] * 253)
        written[-1].write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return written


def _write_parquet(path: Path, table: pa.Table, row_group_size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size, compression="snappy")


def _cut(items: Sequence, parts: int) -> list[list]:
    """`parts` runs of nearly equal length, in order; some may be empty."""
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[first:last]) for first, last in itertools.pairwise(bounds)]
