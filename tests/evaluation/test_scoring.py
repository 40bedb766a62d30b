"""`anlit score`: log-likelihoods are equal to passes over single windows; the table."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import normalizers

from anlit import GPT, AnGPT, DynamicNTK, LogN, ScaleInvariant
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.evaluation.generation import Separator
from anlit.evaluation.scoring import score_documents
from anlit.nn.models.decoder import Decoder
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run_with_text
from tests.nn.models.tiny import decoder, random_tokens

LENGTH = 16
END = 3
DOCUMENTS = [random_tokens(n, seed=n).numpy() for n in (1, 2, 15, 16, 17, 40, 3)]
TEXTS = ["the cat sat on the mat by the dog " * 12, "naïve café – ☕ 🐈 for the cats", "x"]

Score = tuple[float, int, int]
"""Log-likelihood, rank and number of tokens of context."""


@torch.no_grad()
def score_by_hand(
    model: Decoder, tokens: np.ndarray, stride: int, separator: int | None, is_seen: bool
) -> list[Score]:
    """Score each token by a forward pass of its own over its window.

    `is_seen`: whether the tokens after the first see the separator.
    """
    row = tokens if separator is None else np.concatenate(([separator], tokens))
    n_separators = len(row) - len(tokens)
    scores: list[Score] = []
    if not n_separators:
        scores.append((np.nan, 0, 0))
    for target in range(1, len(row)):
        n_later_windows = math.ceil(max(0, target - LENGTH) / stride)
        begin = max(0, min(len(row) - 1, LENGTH + n_later_windows * stride) - LENGTH)
        is_hidden = bool(n_separators and begin == 0 and target > 1 and not is_seen)
        context = row[begin + is_hidden : target]
        log_likelihoods = model(torch.from_numpy(context)[None])[0, -1].log_softmax(-1)
        log_likelihood = log_likelihoods[row[target]]
        rank = int((log_likelihoods > log_likelihood).sum()) + 1
        n_context = target - n_separators - max(0, begin - n_separators)
        scores.append((log_likelihood.item(), rank, n_context))
    return scores


CASES = {
    "separator at the end": (Separator(END, "end"), {}, 6, False),
    "separator at the start": (Separator(END, "start"), {}, 1, True),
    "no masking": (Separator(END, "end"), {"document_masking": False}, 16, True),
    "no separator": (Separator(), {"attention": LogN()}, 6, True),
}
"""Separator, settings of the model, stride, and whether tokens see the separator."""


@pytest.mark.parametrize("name", CASES)
def test_scores_are_equal_to_single_passes(name: str) -> None:
    separator, settings, stride, is_seen = CASES[name]
    model = decoder(AnGPT, **{"attention": ScaleInvariant(), **settings})
    documents = []
    expected = []
    for tokens in DOCUMENTS:
        tokens = np.where(tokens == END, END + 1, tokens)
        documents.append(tokens)
        expected.append(score_by_hand(model, tokens, stride, separator.token, is_seen))

    for batch_size in (1, 3, None):
        scores = list(score_documents(model, documents, LENGTH, stride, separator, batch_size))

        for actual, expected_scores in zip(scores, expected, strict=True):
            log_likelihood, rank, n_context = zip(*expected_scores, strict=True)
            np.testing.assert_allclose(actual.log_likelihood, log_likelihood, rtol=1e-5, atol=1e-5)
            assert actual.rank.tolist() == list(rank)
            assert actual.n_context.tolist() == list(n_context)


def test_positions_that_follow_the_length_do_not_depend_on_the_batch() -> None:
    model = decoder(GPT, attention=ScaleInvariant(), positions=DynamicNTK(training_length=8))

    together = list(score_documents(model, DOCUMENTS, LENGTH, 6))

    for tokens, expected in zip(DOCUMENTS, together, strict=True):
        (alone,) = score_documents(model, [tokens], LENGTH, 6, batch_size=1)
        np.testing.assert_allclose(
            alone.log_likelihood, expected.log_likelihood, rtol=1e-5, atol=1e-5
        )


def write_json_lines(file: Path, texts: list[str]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}) + "\n")


def test_the_table_has_every_token_of_every_text(
    run_with_text: Path, tmp_path: Path, capsys
) -> None:
    text_file = tmp_path / "text.txt"
    text_file.write_text(TEXTS[0], encoding="utf-8")
    lines_file = tmp_path / "texts.jsonl"
    write_json_lines(lines_file, TEXTS[1:])
    files = [str(text_file), str(lines_file)]
    output = tmp_path / "scores" / "out.parquet"

    options = [f"--output={output}", "--json"]
    assert main(["score", str(run_with_text), *files, *options]) == 0

    totals = json.loads(capsys.readouterr().out)
    table = pq.read_table(output)
    rows = table.to_pylist()
    documents: list[list[dict[str, Any]]] = [[], [], []]
    for row in rows:
        documents[row["document"]].append(row)
    sources = [files[0], files[1], files[1]]
    for document, text, file in zip(documents, TEXTS, sources, strict=True):
        check_document(document, text, file)
        has_partial_characters = "" in (row["text"] for row in document)
        assert has_partial_characters == (text == TEXTS[1])
    nats = -sum(row["log_likelihood"] for row in rows)
    n_bytes = len("".join(TEXTS).encode())
    assert totals["documents"] == 3
    assert totals["tokens"] == totals["scored"] == len(rows)
    assert totals["bytes"] == n_bytes
    assert totals["nats"] == pytest.approx(nats)
    assert totals["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes)
    record = json.loads(table.schema.metadata[b"anlit"])
    assert (record["length"], record["stride"], record["architecture"]) == (16, 8, "GPT")
    assert record["command"].startswith("anlit score ")


def check_document(rows: list[dict[str, Any]], text: str, file: str) -> None:
    """The rows have all tokens of a document in order, and their text is the document."""
    content = text.encode()
    joined = ""
    for position, row in enumerate(rows):
        characters = content[row["byte_start"] : row["byte_end"]].decode()
        assert row["position"] == position
        assert row["source"].startswith(f"{file}, ")
        assert row["text"] in characters
        joined += row["text"]
    assert joined == text
    assert rows[0]["byte_start"] == 0
    assert rows[-1]["byte_end"] == len(content)


def test_totals_without_documents_are_null(run_with_text: Path, tmp_path: Path, capsys) -> None:
    empty_file = tmp_path / "empty.jsonl"
    empty_file.touch()
    output = tmp_path / "o.parquet"

    main(["score", str(run_with_text), str(empty_file), "--output", str(output), "--json"])

    totals = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert totals == {
        "nats_per_token": None,
        "bits_per_byte": None,
        "documents": 0,
        "changed": 0,
        "tokens": 0,
        "scored": 0,
        "bytes": 0,
        "nats": 0,
    }


def test_a_record_without_a_text_is_named_and_no_table_written(
    run_with_text: Path, tmp_path: Path, refusal
) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": TEXTS[0]}) + "\n{}")

    message = refusal("score", run_with_text, file, "--output", tmp_path / "out.parquet")

    assert 'text.jsonl, line 2: the field "text" is missing' in message
    assert not list(tmp_path.glob("*.parquet*"))


@pytest.mark.parametrize(("text", "is_changed"), [("the cat sat", False), ("The Cat sat", True)])
def test_a_text_that_the_tokenizer_changes_has_no_bits_per_byte(
    text: str, is_changed: bool, tmp_path: Path, capsys
) -> None:
    tokenizer = train_bpe(TEXTS, VOCABULARY - 10)
    tokenizer.normalizer = normalizers.Lowercase()
    run = make_run_with_text(tmp_path, GPT, tokenizer)
    (tmp_path / "text.txt").write_text(text)
    output = ["--output", str(tmp_path / "o.parquet"), "--json"]

    assert main(["score", str(run), str(tmp_path / "text.txt"), *output]) == 0

    printed = capsys.readouterr()
    totals = json.loads(printed.out)
    warning = "gives back 1 of 1 documents as another text, so bits per byte are not known"
    assert totals["changed"] == int(is_changed)
    assert (totals["bits_per_byte"] is None) == is_changed
    assert (warning in printed.err) == is_changed
