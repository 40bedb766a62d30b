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

SUBSETS = (
    "RedPajamaCommonCrawl",
    "RedPajamaC4",
    "RedPajamaGithub",
    "RedPajamaBook",
    "RedPajamaArXiv",
    "RedPajamaWikipedia",
    "RedPajamaStackExchange",
)
"""SlimPajama's subsets."""
LONG_DOCUMENT_BYTES = 1_100_000
"""Size of the long document, at least."""
END_OF_DOCUMENT = "<|endoftext|>"
GPT2_END_OF_DOCUMENT = 50256

PHRASES = (
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
    "\u2028line and paragraph\u2029separators",  # raw in JSON; str.splitlines() cuts at them
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎 \U0010fffd",  # outside the basic plane
    'quotes " \\ / and {"text": "json"}',
    "def f(x):\n    return x ** 2  # code\n",
    "right\u202eto\u202cleft",
    f"says {END_OF_DOCUMENT} in the middle",
    "trailing spaces   \n ",
)
"""Texts in many scripts, and with characters that programs get wrong."""
ODD_TEXTS = (
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
    """Yield `n` different texts: first `ODD_TEXTS`, then a long text, then mixtures of `PHRASES`.

    The same arguments give the same texts; the mixtures of two seeds differ. No text is empty.
    """
    rng = random.Random(seed)
    for number in range(n):
        if number < len(ODD_TEXTS):
            yield ODD_TEXTS[number]
        elif number == len(ODD_TEXTS):
            yield _mixture(rng, LONG_DOCUMENT_BYTES)
        else:
            yield f"{number} of {seed}: {_mixture(rng, rng.randrange(1, 3000))}"


def short_documents(n: int, seed: int) -> list[str]:
    """Return `n` mixtures of `PHRASES`."""
    return list(documents(10 + n, seed))[10:]


def _mixture(rng: random.Random, size: int) -> str:
    phrases: list[str] = []
    while size > 0:
        phrases.append(rng.choice(PHRASES) + rng.choice((" ", "\n", "")))
        size -= len(phrases[-1].encode("utf-8"))
    return "".join(phrases)


def cut(items: Sequence, n_runs: int) -> list[list]:
    """Cut a sequence into runs of nearly equal length, a run for each file of a layout."""
    bounds = [len(items) * number // n_runs for number in range(n_runs + 1)]
    return [list(items[start:stop]) for start, stop in itertools.pairwise(bounds)]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def json_lines(
    texts: Iterable[str], subsets: Iterable[str] = ("RedPajamaC4",), field: str = "text"
) -> list[bytes]:
    """Return a line for each text, with subsets in turn; every second line has JSON's escapes."""
    lines = []
    for number, (text, subset) in enumerate(zip(texts, itertools.cycle(subsets), strict=False)):
        values = {field: text, "meta": {"redpajama_set_name": subset}}
        line = json.dumps(values, ensure_ascii=number % 2 == 1)
        lines.append(f"{line}\n".encode())
    return lines


def slimpajama(
    folder: Path, documents_by_split: dict[str, Sequence[str]], n_files: int = 2
) -> list[Path]:
    """Write cerebras/SlimPajama-627B: train/chunk1/example_train_0.jsonl.zst and so on.

    Document i of a split is of subset `SUBSETS[i % 7]`. Every second file has several zstd frames.
    """
    files = []
    for split, texts in documents_by_split.items():
        example = "example_train_0" if split == "train" else "example_holdout_0"
        for number, lines in enumerate(cut(json_lines(texts, SUBSETS), n_files)):
            n_frames = 3 if number % 2 else 1
            frames = [zstandard.compress(b"".join(frame)) for frame in cut(lines, n_frames)]
            path = folder / split / f"chunk{number + 1}" / f"{example}.jsonl.zst"
            files.append(write(path, b"".join(frames)))
    return files


def openwebtext(
    folder: Path,
    texts: Sequence[str],
    n_files: int = 2,
    row_group_size: int = 10,
    name: str = "plain_text/train-{:05d}-of-00080.parquet",
    more_columns: Mapping[str, Any] = {},
) -> list[Path]:
    """Write Skylion007/openwebtext: plain_text/train-00000-of-00080.parquet and so on.

    `more_columns` are columns of a single value.
    """
    files = []
    for number, file_texts in enumerate(cut(texts, n_files)):
        columns: dict[str, Any] = {"text": pa.array(file_texts, pa.string())}
        for column, value in more_columns.items():
            columns[column] = [value] * len(file_texts)
        path = write(folder / name.format(number), b"")
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        files.append(path)
    return files


def fineweb(
    folder: Path, texts: Sequence[str], n_files: int = 2, sample: str = "10BT"
) -> list[Path]:
    """Write HuggingFaceFW/fineweb: sample/10BT/000_00000.parquet and so on, with more columns."""
    more_columns = {
        "id": "<urn:uuid:1>",
        "dump": "CC-MAIN-2013-20",
        "language_score": 0.9,
        "token_count": 7,
    }
    name = f"sample/{sample}/{{:03d}}_00000.parquet"
    return openwebtext(folder, texts, n_files, name=name, more_columns=more_columns)


def fineweb_bin(
    folder: Path,
    token_documents: Sequence[Sequence[int]],
    tokens_per_file: int,
    separator: int = GPT2_END_OF_DOCUMENT,
) -> list[Path]:
    """Write kjj0/fineweb10B-gpt2: fineweb_val_000000.bin, fineweb_train_000001.bin, ….

    Documents begin with `separator`. Files end in the middle of documents.
    """
    tokens: list[int] = []
    for document in token_documents:
        tokens += [separator, *document]
    files = []
    for number, start in enumerate(range(0, len(tokens), tokens_per_file)):
        name = f"fineweb_{'train' if number else 'val'}_{number:06d}.bin"
        content = bin_tokens(tokens[start : start + tokens_per_file])
        files.append(write(folder / name, content))
    return files


def bin_tokens(
    tokens: Sequence[int], magic: int = 20240520, version: int = 1, count: int | None = None
) -> bytes:
    """Return a .bin file; its header says `count` tokens, by default as many as there are."""
    n_tokens = len(tokens) if count is None else count
    header = struct.pack("<256i", magic, version, n_tokens, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def json_files(folder: Path, texts: list[str]) -> str:
    """Write four files of JSON lines with the text in `content`; return a pattern for them."""
    for number, file_texts in enumerate(cut(texts, 4)):
        lines = json_lines(file_texts, field="content")
        write(folder / f"{number}.jsonl", b"".join(lines))
    return "*.jsonl"


def text_files(folder: Path, texts: list[str]) -> Path:
    """Write a file for each text, and a file with another ending; return the folder."""
    for number, text in enumerate(texts):
        write(folder / f"part{number % 3}" / f"{number}.txt", text.encode())
    (folder / "other.md").write_text("not asked for")
    return folder
