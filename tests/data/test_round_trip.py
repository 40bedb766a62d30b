"""Each kind of tokenizer with each kind of text: the changes, their counts and their messages."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from anlit import Mixture, TokenShards
from anlit.cli import main
from anlit.data.round_trip import RoundTrip
from anlit.data.tokenizer import encode_documents, load_tokenizer
from tests.data.layouts import END_OF_DOCUMENT, json_lines, write
from tests.data.reader import edit, hashes, read_json

PLAIN = [f"the cat sat on the mat with dog number {number}" for number in range(40)]
SAMPLE = [*PLAIN, "The Cat padded text a b 0123456789"]
UNKNOWN = "[UNK]"

TEXTS = {
    "ascii": "the cat sat on the mat",
    "capitals": "The Cat",
    "emoji": "🦜🦜🦜🦜",
    "accents": "größe naïve",
    "decomposed": "e\u0301 a\u0308",
    "ligature": "ﬁne ①",
    "control": "a\x00\x07\tb\r\n",
    "spaces": "   ",
    "padded": " padded  text ",
    "empty": "",
}
SAME = "same"
NORMALISED = "normalised"
CHANGED = "changed"
NO_TOKEN = "no_token"
LOST = "lost"
TABLE: dict[str, dict[str, str]] = {
    "bytes": {},
    "bytes, dropout": {},
    "bytes, NFC": {"decomposed": NORMALISED},
    "bytes, NFKC": {"decomposed": NORMALISED, "ligature": CHANGED},
    "bytes, Lowercase": {"capitals": CHANGED},
    "bytes, Strip": {"control": CHANGED, "spaces": NO_TOKEN, "padded": CHANGED},
    "bytes, prefix space": dict.fromkeys(TEXTS.keys() - {"spaces", "padded", "empty"}, CHANGED),
    "letters": {
        "emoji": NO_TOKEN,
        "accents": CHANGED,
        "decomposed": CHANGED,
        "ligature": CHANGED,
        "control": CHANGED,
    },
    "letters, Metaspace": {
        "emoji": LOST,
        "accents": CHANGED,
        "decomposed": CHANGED,
        "ligature": CHANGED,
        "control": CHANGED,
        "spaces": CHANGED,
        "padded": CHANGED,
    },
    "words": {
        "emoji": CHANGED,
        "accents": CHANGED,
        "decomposed": CHANGED,
        "ligature": CHANGED,
        "control": CHANGED,
        "spaces": NO_TOKEN,
        "padded": CHANGED,
    },
}
"""How each tokenizer changes a text; other texts come back. The empty text never has a token."""
DECODED = TABLE.keys() - {"bytes", "bytes, dropout", "bytes, NFC"}
"""Tokenizers with texts that are decoded for the comparison."""
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "Lowercase": normalizers.Lowercase(),
    "Strip": normalizers.Strip(),
}


def train_on_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def train_on_letters(option: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    if option == "Metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def train_on_bytes(option: str) -> Tokenizer:
    dropout = 0.5 if option == "dropout" else None
    has_prefix_space = option == "prefix space"
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = NORMALIZERS.get(option)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def write_tokenizer(kind: str, path: Path) -> Path:
    """Write a tokenizer of `TABLE`, with the end of document as its last token."""
    units, _, option = kind.partition(", ")
    if units == "words":
        tokenizer = train_on_words()
    elif units == "letters":
        tokenizer = train_on_letters(option)
    else:
        tokenizer = train_on_bytes(option)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    tokenizer.save(str(path))
    return path


def prepare_command(folder: Path, tokenizer: Path, output: Path) -> list[str]:
    """Return the command that prepares the JSON lines of a folder."""
    return [
        "prepare",
        "TextFiles",
        f"--source={folder}",
        "--pattern=*.jsonl",
        "--val_fraction=0.2",
        f"--tokenizer={tokenizer}",
        f"--output={output}",
    ]


@pytest.mark.parametrize("kind", TABLE)
def test_each_text_changes_as_the_table_says(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(kind, tmp_path / "tokenizer.json"))
    round_trip = RoundTrip(tokenizer)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    changes = {}
    for name, text in TEXTS.items():
        (tokens,) = encode_documents(tokenizer, [text], end, "<u2")
        (change,) = round_trip.find_changes([text], [tokens[:-1]])
        changes[name] = SAME if change is None else change.value
        if len(tokens) == 1:
            changes[name] = NO_TOKEN
        decoded = tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False)
        assert (decoded == text) == (change is None), name

    assert changes == {**dict.fromkeys(TEXTS, SAME), "empty": NO_TOKEN, **TABLE[kind]}
    assert round_trip.decodes == (kind in DECODED)


def without_zeros(counts: dict[str, int]) -> dict[str, int]:
    return {key: count for key, count in counts.items() if count}


@pytest.mark.parametrize("kind", TABLE)
def test_prepare_counts_and_reports_the_changes(
    kind: str, source: Path, tmp_path: Path, out: Path, capsys
) -> None:
    """Documents without a token are left out."""
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer.json")
    texts = [*TEXTS.values(), *PLAIN]
    write(source / "a.jsonl", b"".join(json_lines(texts)))
    command = prepare_command(source, tokenizer, out)

    assert main([*command, "--on_bad=skip"]) == 0

    messages = capsys.readouterr().err
    expected = Counter(TABLE[kind].values())
    if kind == "bytes, prefix space":
        expected[CHANGED] += len(PLAIN)
    manifest = read_json(out / "manifest.json")
    changes = {NORMALISED: expected[NORMALISED], CHANGED: expected[CHANGED]}
    assert manifest.get("changes", {}) == without_zeros(changes)
    n_documents = len(texts) - 1 - expected[NO_TOKEN] - expected[LOST]
    assert manifest["documents"] == n_documents
    skipped = {reason: entry["count"] for reason, entry in manifest["skipped"].items()}
    expected_skipped = {"empty": 1, "no_token": expected[NO_TOKEN], "no_text": expected[LOST]}
    assert skipped == without_zeros(expected_skipped)
    clauses = {NORMALISED: "in another Unicode", CHANGED: "as another text, so no"}
    for change, clause in clauses.items():
        count = f"{changes[change]} of {n_documents} documents come back from their tokens"
        assert (f"{count} {clause}" in messages) == (changes[change] > 0)


def test_a_repair_makes_the_same_tokens_with_a_tokenizer_that_has_dropout(
    source: Path, tmp_path: Path, out: Path
) -> None:
    tokenizer = write_tokenizer("bytes, dropout", tmp_path / "tokenizer.json")
    write(source / "a.jsonl", b"".join(json_lines(PLAIN)))
    command = prepare_command(source, tokenizer, out)
    assert main(command) == 0
    expected = hashes(out)
    chunk = next(out.glob("train/chunk-*"))
    chunk.unlink()

    assert main(command) == 0

    assert hashes(out) == expected


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("letters", "🦜🦜🦜🦜", "the tokenizer makes no token of its text"),
        ("bytes, Strip", "   ", "the tokenizer makes no token of its text"),
        (
            "letters, Metaspace",
            "🦜🦜🦜🦜",
            "nothing of its text comes back from the tokenizer's tokens",
        ),
    ],
)
def test_a_document_that_leaves_nothing_stops_the_command(
    kind: str, text: str, problem: str, source: Path, tmp_path: Path, out: Path, capsys
) -> None:
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer.json")
    for number, content in enumerate([text, *PLAIN[:3]]):
        write(source / f"{number}.txt", content.encode())
    options = [f"--source={source}", f"--output={out}", f"--tokenizer={tokenizer}"]

    assert main(["prepare", "TextFiles", *options]) == 2

    error = capsys.readouterr().err.splitlines()[-1]
    assert f"0.txt, the file: {problem}: repair the file" in error


@pytest.mark.parametrize(
    ("kind", "texts", "has_bits"),
    [
        ("bytes", ["The Cat", "🦜"], True),
        ("bytes, NFC", ["e\u0301", "a\u0308"], True),
        ("bytes, Lowercase", ["The Cat", "the Cat"], False),
        ("bytes, Lowercase", ["the cat", "the dog"], True),
        ("letters", ["cat 🦜", "dog 🦜"], False),
        ("words", ["parrot", "cat cat horse"], False),
    ],
)
def test_bits_per_byte_are_reported_only_if_validation_texts_come_back(
    kind: str, texts: list[str], has_bits: bool, source: Path, tmp_path: Path, out: Path, caplog
) -> None:
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer.json")
    texts_by_split = {"train": PLAIN, "validation": texts}
    for split, texts_of_split in texts_by_split.items():
        write(source / split / "a.jsonl", b"".join(json_lines(texts_of_split)))
    options = [f"--source={source}", f"--output={out}", f"--tokenizer={tokenizer}"]
    assert main(["prepare", "SlimPajama", *options]) == 0

    data = TokenShards(str(out), batch_size=1, context_length=2)
    with caplog.at_level("INFO"):
        data.setup()
    folders = {"first": str(out), "second": str(out)}
    mixture = Mixture(folders, batch_size=1, context_length=2)
    mixture.setup()

    assert (data.bytes_per_token("val") is not None) == has_bits
    assert (mixture.bytes_per_token("val") is not None) == has_bits
    message = "the tokenizer gives back 2 of 2 documents as another text, so no bits per byte"
    assert (message in caplog.text) != has_bits


def test_tokens_that_take_the_spaces_beside_them_are_decoded(tmp_path: Path) -> None:
    path = write_tokenizer("bytes", tmp_path / "tokenizer.json")
    token = {"id": 400, "content": "<x>", "lstrip": True, "special": False}
    flags = {"single_word": False, "rstrip": False, "normalized": False}
    edit(path, lambda content: content["added_tokens"].append(token | flags))
    tokenizer = load_tokenizer(path)
    texts = ["the cat", "the <x>"]
    tokens = [array[:-1] for array in encode_documents(tokenizer, texts, 0, "<u2")]

    first_change, second_change = RoundTrip(tokenizer).find_changes(texts, tokens)

    assert first_change is None
    assert second_change == CHANGED


def test_a_split_that_cuts_and_drops_is_decoded(tmp_path: Path) -> None:
    """Some tokenizers keep only the matches of an expression; decoding tells if these are all."""
    path = write_tokenizer("bytes", tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    steps = [split, {**content["pre_tokenizer"], "use_regex": False}]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}

    path.write_text(json.dumps(content))
    assert RoundTrip(load_tokenizer(path)).decodes

    split["behavior"] = "Isolated"
    path.write_text(json.dumps(content))
    assert not RoundTrip(load_tokenizer(path)).decodes
