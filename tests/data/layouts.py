"""Files in the hub's layouts and schemas, written without the package's own writers and readers."""

import itertools
import json
import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

SETS = ("CommonCrawl", "C4", "Github", "Book", "ArXiv", "Wikipedia", "StackExchange")
SET_NAMES = tuple(f"RedPajama{name}" for name in SETS)
LONG = 1_100_000  # bytes of the long document, at least
END_OF_DOCUMENT = "<|endoftext|>"
GPT2_END_OF_DOCUMENT = 50256

PIECES = (
    "the norm of a row is one", "größer, naïve, œuvre, Łódź", "Быстрая лиса и ёж", "Η γρήγορη αλεπού, ᾧ",
    "素早い茶色の狐。カタカナ", "敏捷的棕色狐狸，龍", "빠른 갈색 여우", "الثعلب البني السريع ١٢٣", "שועל חום מהיר",
    "तेज़ भूरी लोमड़ी क्ष", "สุนัขจิ้งจอก",
    "e\u0301 a\u0308\u0323 Z̷̢͘ạ̵lgo",  # combining marks
    "🙂 👩🏽\u200d🚀 🇩🇪 👨\u200d👩\u200d👧\u200d👦",  # joined emoji
    "line one\r\nline two\r\n\tindented\n\n\n", "zero\u200bwidth\u200c\ufeffmarks\u2060 and\u00a0no\u202fbreak",
    "\x00\x01\x07\x08\x0b\x0c\x1b[31m\x7f\x85",  # control characters
    "\u2028line and paragraph\u2029separators",  # JSON allows them raw; str.splitlines() cuts at them
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎 \U0010fffd",  # outside the basic plane
    'quotes " \\ / and {"text": "json"}', "def f(x):\n    return x ** 2  # code\n",
    "right\u202eto\u202cleft", f"says {END_OF_DOCUMENT} in the middle", "trailing spaces   \n ",
)  # fmt: skip
FIRST = (f"a text that says {END_OF_DOCUMENT} and goes on", "x", "\n", "é", "🙂", "\x00", "\ufeff",
         " leading and trailing space ")  # fmt: skip


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
    parts: list[str] = []
    while size > 0:
        parts.append(rng.choice(PIECES) + rng.choice((" ", "\n", "")))
        size -= len(parts[-1].encode("utf-8"))
    return "".join(parts)


def cut(items: Sequence, parts: int) -> list[list]:
    """`parts` runs of nearly equal length, in order: what each file of a layout gets."""
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[first:last]) for first, last in itertools.pairwise(bounds)]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def json_lines(
    texts: Iterable[str], names: Iterable[str] = SET_NAMES[1:2], field: str = "text"
) -> list[bytes]:
    """A line for each text, its subset among `names` in turn; every second has escapes, which JSON may have."""
    return [
        json.dumps(
            {field: text, "meta": {"redpajama_set_name": name}}, ensure_ascii=bool(number % 2)
        ).encode()
        + b"\n"
        for number, (text, name) in enumerate(zip(texts, itertools.cycle(names), strict=False))
    ]


def slimpajama(
    folder: Path, documents_by_split: dict[str, Sequence[str]], n_files: int = 2
) -> list[Path]:
    """cerebras/SlimPajama-627B: train/chunk1/example_train_0.jsonl.zst, …, validation/…, test/…, in order.

    Document i of a split is of subset `SET_NAMES[i % 7]`. Every second file has several zstd frames.
    """
    files = []
    for split, texts in documents_by_split.items():
        for number, lines in enumerate(cut(json_lines(texts, SET_NAMES), n_files)):
            name = f"{split}/chunk{number + 1}/example_{'train' if split == 'train' else 'holdout'}_0.jsonl.zst"
            frames = cut(lines, 1 + 2 * (number % 2))
            files.append(
                write(
                    folder / name, b"".join(zstandard.compress(b"".join(frame)) for frame in frames)
                )
            )
    return files


def openwebtext(
    folder: Path, texts: Sequence[str], n_files: int = 2, row_group_size: int = 10,
    name: str = "plain_text/train-{:05d}-of-00080.parquet", others: Mapping[str, Any] = {},
) -> list[Path]:  # fmt: skip
    """Skylion007/openwebtext: plain_text/train-00000-of-00080.parquet, …, with one column of text, in order."""
    files = []
    for number, part in enumerate(cut(texts, n_files)):
        columns = {key: [value] * len(part) for key, value in others.items()}
        files.append(write(folder / name.format(number), b""))
        table = pa.table({"text": pa.array(part, pa.string()), **columns})
        pq.write_table(table, files[-1], row_group_size=row_group_size)
    return files


def fineweb(
    folder: Path, texts: Sequence[str], n_files: int = 2, sample: str = "10BT"
) -> list[Path]:
    """HuggingFaceFW/fineweb: sample/10BT/000_00000.parquet, …, the text among other columns, in order."""
    others = {
        "id": "<urn:uuid:1>",
        "dump": "CC-MAIN-2013-20",
        "language_score": 0.9,
        "token_count": 7,
    }
    return openwebtext(
        folder, texts, n_files, 10, f"sample/{sample}/{{:03d}}_00000.parquet", others
    )


def fineweb_bin(
    folder: Path,
    token_documents: Sequence[Sequence[int]],
    tokens_per_file: int,
    end: int = GPT2_END_OF_DOCUMENT,
) -> list[Path]:
    """kjj0/fineweb10B-gpt2: fineweb_val_000000.bin, …, cut in the middle of documents, which begin with `end`."""
    stream = [token for document in token_documents for token in (end, *document)]
    files = []
    for number, start in enumerate(range(0, len(stream), tokens_per_file)):
        name = f"fineweb_{'train' if number else 'val'}_{number:06d}.bin"
        files.append(write(folder / name, bin_tokens(stream[start : start + tokens_per_file])))
    return files


def bin_tokens(
    tokens: Sequence[int], magic: int = 20240520, version: int = 1, count: int | None = None
) -> bytes:
    header = [magic, version, len(tokens) if count is None else count, *[0] * 253]
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def json_files(folder: Path, texts: list[str]) -> str:
    for number, part in enumerate(cut(texts, 4)):
        write(folder / f"{number}.jsonl", b"".join(json_lines(part, field="content")))
    return "*.jsonl"


def text_files(folder: Path, texts: list[str]) -> Path:
    """A file for each text, and one with another ending."""
    for number, text in enumerate(texts):
        write(folder / f"part{number % 3}" / f"{number}.txt", text.encode())
    (folder / "other.md").write_text("not asked for")
    return folder
