"""What each kind of tokenizer does to each kind of text: what comes back, what is counted, what is said."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from anlit import Mixture, TokenShards
from anlit.cli import main
from anlit.data.round_trip import RoundTrip
from anlit.data.tokenizer import encode_documents, load_tokenizer
from tests.data.layouts import END_OF_DOCUMENT, json_lines, write
from tests.data.reader import edit, hashes, read_json, read_stream

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
SAME, NORMALISED, CHANGED = "same", "normalised", "changed"
NO_TOKEN, LOST = "no_token", "lost"
TABLE: dict[str, dict[str, str]] = {
    "bytes": {},
    "bytes, dropout": {},
    "bytes, NFC": {"decomposed": NORMALISED},
    "bytes, NFKC": {"decomposed": NORMALISED, "ligature": CHANGED},
    "bytes, Lowercase": {"capitals": CHANGED},
    "bytes, Strip": {"control": CHANGED, "spaces": NO_TOKEN, "padded": CHANGED},
    "bytes, prefix space": {
        text: CHANGED for text in TEXTS if text not in ("spaces", "padded", "empty")
    },
    "letters": {
        "emoji": NO_TOKEN, "accents": CHANGED, "decomposed": CHANGED, "ligature": CHANGED, "control": CHANGED,
    },
    "letters, Metaspace": {
        "emoji": LOST, "accents": CHANGED, "decomposed": CHANGED, "ligature": CHANGED, "control": CHANGED,
        "spaces": CHANGED, "padded": CHANGED,
    },
    "words": {
        "emoji": CHANGED, "accents": CHANGED, "decomposed": CHANGED, "ligature": CHANGED, "control": CHANGED,
        "spaces": NO_TOKEN, "padded": CHANGED,
    },
}  # fmt: skip
"""What becomes of a text, if it does not come back as it is. The empty text has no token with any of them."""
DECODED = {name for name in TABLE if name not in ("bytes", "bytes, dropout", "bytes, NFC")}
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "Lowercase": normalizers.Lowercase(),
    "Strip": normalizers.Strip(),
}


def write_tokenizer(kind: str, path: Path) -> Path:
    kind, _, option = kind.partition(", ")
    trainer: Any
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=[UNKNOWN], show_progress=False)
    elif kind == "letters":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.Fuse()
        if option == "Metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE(dropout=0.5 if option == "dropout" else None))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=option == "prefix space"
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        )
    if option in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[option]
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("kind", TABLE)
def test_what_becomes_of_each_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(kind, tmp_path / "tokenizer.json"))
    round_trip = RoundTrip(tokenizer)
    assert round_trip.decodes == (kind in DECODED)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    found = {}
    for name, text in TEXTS.items():
        (tokens,) = encode_documents(tokenizer, [text], end, "<u2")
        (change,) = round_trip.changes([text], [tokens[:-1]])
        found[name] = NO_TOKEN if len(tokens) == 1 else change.kind.value if change else SAME
        back = tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False)
        assert (back == text) == (change is None), name
    assert found == dict.fromkeys(TEXTS, SAME) | {"empty": NO_TOKEN} | TABLE[kind]


@pytest.mark.parametrize("kind", TABLE)
def test_what_prepare_counts_and_says(kind: str, tmp_path: Path, capsys) -> None:
    """With documents that have no token left out, and the same tokens a second time."""
    path = write_tokenizer(kind, tmp_path / "tokenizer.json")
    texts = [*TEXTS.values(), *PLAIN]
    write(tmp_path / "text" / "a.jsonl", b"".join(json_lines(texts)))
    source = ["--source", str(tmp_path / "text"), "--pattern", "*.jsonl", "--val_fraction", "0.2"]
    command = ["prepare", "TextFiles", *source, "--tokenizer", str(path), "--on_bad", "skip"]
    out = tmp_path / "out"
    assert main([*command, "--output", str(out)]) == 0
    said = capsys.readouterr().err

    becomes = Counter(TABLE[kind].values())
    plain = len(PLAIN) if kind == "bytes, prefix space" else 0
    changes = {NORMALISED: becomes[NORMALISED], CHANGED: becomes[CHANGED] + plain}
    manifest = read_json(out / "manifest.json")
    assert manifest.get("changes", {}) == {key: n for key, n in changes.items() if n}
    assert manifest["documents"] == len(texts) - 1 - becomes[NO_TOKEN] - becomes[LOST]
    skipped = {reason: entry["count"] for reason, entry in manifest["skipped"].items()}
    refused = {"empty": 1, "no_token": becomes[NO_TOKEN], "no_text": becomes[LOST]}
    assert skipped == {reason: n for reason, n in refused.items() if n}
    for change, words in ((NORMALISED, "in another Unicode"), (CHANGED, "as another text, so no")):
        count = (
            f"{changes[change]} of {manifest['documents']} documents come back from their tokens"
        )
        assert bool(re.search(rf"{count} {words}.*a\.jsonl, line \d+: .* becomes ", said)) == (
            changes[change] > 0
        )
    assert ("Each document is decoded again" in said) == (kind in DECODED)
    assert ("dropout is switched off" in said) == ("dropout" in kind)

    assert main([*command, "--output", str(tmp_path / "again")]) == 0
    for stream in ("train", "val"):
        first, second = read_stream(out, stream), read_stream(tmp_path / "again", stream)
        assert first.tolist() == second.tolist()


def test_a_repair_makes_the_same_tokens_with_a_tokenizer_that_has_dropout(tmp_path: Path) -> None:
    path = write_tokenizer("bytes, dropout", tmp_path / "tokenizer.json")
    write(tmp_path / "text" / "a.jsonl", b"".join(json_lines(PLAIN)))
    source = ["--source", str(tmp_path / "text"), "--pattern", "*.jsonl", "--val_fraction", "0.2"]
    out = tmp_path / "out"
    command = ["prepare", "TextFiles", *source, "--tokenizer", str(path), "--output", str(out)]
    assert main(command) == 0
    before = hashes(out)
    next((out / "train").glob("chunk-*")).unlink()
    assert main(command) == 0
    assert hashes(out) == before


@pytest.mark.parametrize(("kind", "text", "problem"), [
    ("letters", "🦜🦜🦜🦜", "the tokenizer makes no token of its text"),
    ("bytes, Strip", "   ", "the tokenizer makes no token of its text"),
    ("letters, Metaspace", "🦜🦜🦜🦜", "nothing of its text comes back from the tokenizer's tokens"),
])  # fmt: skip
def test_a_document_that_leaves_nothing_stops_the_command(
    kind: str, text: str, problem: str, tmp_path: Path, capsys
) -> None:
    path = write_tokenizer(kind, tmp_path / "tokenizer.json")
    for number, content in enumerate([text, *PLAIN[:3]]):
        write(tmp_path / "text" / f"{number}.txt", content.encode())
    source = ["--source", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    assert main(["prepare", "TextFiles", *source, "--tokenizer", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"0.txt, the file: {problem}: repair the file" in said


@pytest.mark.parametrize(("kind", "texts", "has_bits"), [
    ("bytes", ["The Cat", "🦜"], True),
    ("bytes, NFC", ["e\u0301", "a\u0308"], True),
    ("bytes, Lowercase", ["The Cat", "the Cat"], False),
    ("bytes, Lowercase", ["the cat", "the dog"], True),
    ("letters", ["cat 🦜", "dog 🦜"], False),
    ("words", ["parrot", "cat cat horse"], False),
])  # fmt: skip
def test_bits_per_byte_are_those_of_the_text_or_none(
    kind: str, texts: list[str], has_bits: bool, tmp_path: Path, caplog
) -> None:
    path = write_tokenizer(kind, tmp_path / "tokenizer.json")
    by_split = {"train": PLAIN, "validation": texts}
    for split, some in by_split.items():
        write(tmp_path / "hub" / split / "a.jsonl", b"".join(json_lines(some)))
    out = str(tmp_path / "out")
    source = ["--source", str(tmp_path / "hub"), "--output", out]
    assert main(["prepare", "SlimPajama", *source, "--tokenizer", str(path)]) == 0
    data = TokenShards(out, batch_size=1, context_length=2)
    with caplog.at_level("INFO"):
        data.setup()
    assert (data.bytes_per_token("val") is not None) == has_bits
    mixture = Mixture({"first": out, "second": out}, batch_size=1, context_length=2)
    mixture.setup()
    assert (mixture.bytes_per_token("val") is not None) == has_bits
    said = "the tokenizer gives back 2 of 2 documents as another text, so no bits per byte"
    assert (said in caplog.text) != has_bits


def test_tokens_that_take_the_spaces_beside_them_are_decoded(tmp_path: Path) -> None:
    path = write_tokenizer("bytes", tmp_path / "tokenizer.json")
    token = {"id": 400, "content": "<x>", "lstrip": True, "special": False}
    flags = {"single_word": False, "rstrip": False, "normalized": False}
    edit(path, lambda content: content["added_tokens"].append(token | flags))
    tokenizer = load_tokenizer(path)
    round_trip = RoundTrip(tokenizer)
    texts = ["the cat", "the <x>"]
    tokens = list(encode_documents(tokenizer, texts, 0, "<u2"))
    kept, change = round_trip.changes(texts, [array[:-1] for array in tokens])
    assert kept is None
    assert (change.kind, change.place) == (CHANGED, "' <x>' becomes '<x>'")


def test_a_split_that_cuts_and_drops_is_decoded(tmp_path: Path) -> None:
    """As in tokenizers that keep what an expression matches; only decoding tells whether that is all."""
    path = write_tokenizer("bytes", tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    steps = [split, content["pre_tokenizer"] | {"use_regex": False}]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(content))
    assert RoundTrip(load_tokenizer(path)).decodes
    steps[0]["behavior"] = "Isolated"
    path.write_text(json.dumps(content))
    assert not RoundTrip(load_tokenizer(path)).decodes
