"""`anlit score`: log-likelihoods are equal to passes over single windows; the table."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import normalizers

from anlit import GPT, AnGPT, DynamicNTK, LogN, ScaleInvariant
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.evaluation import scores_table
from anlit.evaluation.generation import Separator
from anlit.evaluation.scoring import score_documents
from anlit.nn.models.decoder import Decoder
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run_with_text
from tests.nn.models.tiny import decoder, random_tokens

LENGTH = 16
END = 3
Row = dict[str, Any]
"""A row of the table of scores."""
LENGTHS = (1, 2, 15, 16, 17, 40, 3)
DOCUMENTS = [random_tokens(n, seed=n).numpy() for n in LENGTHS]
TEXTS = ["the cat sat on the mat by the dog " * 12, "naïve café – ☕ 🐈 for the cats", "x"]


class Case(NamedTuple):
    """How documents are scored."""

    separator: Separator
    settings: dict[str, Any]
    """Settings of the model."""
    stride: int
    is_separator_seen: bool
    """Whether the tokens after the first see the separator."""


CASES = {
    "separator at the end": Case(Separator(END, "end"), {}, 6, False),
    "separator at the start": Case(Separator(END, "start"), {}, 1, True),
    "no masking": Case(Separator(END, "end"), {"document_masking": False}, 16, True),
    "no separator": Case(Separator(), {"attention": LogN()}, 6, True),
}


class Score(NamedTuple):
    """The score of a token."""

    log_likelihood: float
    rank: int
    n_context: int
    """Tokens of the context."""


@torch.no_grad()
def score_by_hand(model: Decoder, tokens: np.ndarray, case: Case) -> list[Score]:
    """Score each token by a separate forward pass over its window."""
    row = tokens
    scores: list[Score] = []
    if case.separator.token is None:
        scores.append(Score(np.nan, 0, 0))
    else:
        row = np.append(case.separator.token, tokens)
    n_separators = len(row) - len(tokens)
    for target in range(1, len(row)):
        n_later_windows = math.ceil(max(0, target - LENGTH) / case.stride)
        end_of_window = min(len(row) - 1, LENGTH + n_later_windows * case.stride)
        begin = max(0, end_of_window - LENGTH)
        n_context = target - n_separators - max(0, begin - n_separators)
        if n_separators and begin == 0 and target > 1 and not case.is_separator_seen:
            begin = 1
        context = torch.from_numpy(row[begin:target])
        (logits,) = model(context[None])
        log_likelihoods = logits[-1].log_softmax(-1)
        log_likelihood = log_likelihoods[row[target]]
        n_better = int((log_likelihoods > log_likelihood).sum())
        scores.append(Score(log_likelihood.item(), 1 + n_better, n_context))
    return scores


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scores_are_equal_to_single_passes(case: Case, batch_size: int | None) -> None:
    model = decoder(AnGPT, **{"attention": ScaleInvariant(), **case.settings})
    documents = [np.where(tokens == END, END + 1, tokens) for tokens in DOCUMENTS]

    scores = list(
        score_documents(model, documents, LENGTH, case.stride, case.separator, batch_size)
    )

    for tokens, actual in zip(documents, scores, strict=True):
        by_hand = score_by_hand(model, tokens, case)
        log_likelihood, rank, n_context = zip(*by_hand, strict=True)
        assert_close(actual.log_likelihood, log_likelihood)
        assert actual.rank.tolist() == list(rank)
        assert actual.n_context.tolist() == list(n_context)


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_positions_that_follow_the_length_do_not_depend_on_the_batch() -> None:
    positions = DynamicNTK(training_length=8)
    model = decoder(GPT, attention=ScaleInvariant(), positions=positions)

    together = list(score_documents(model, DOCUMENTS, LENGTH, 6))

    for tokens, expected in zip(DOCUMENTS, together, strict=True):
        (alone,) = score_documents(model, [tokens], LENGTH, 6, batch_size=1)
        assert_close(alone.log_likelihood, expected.log_likelihood)


def write_json_lines(file: Path, texts: list[str]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}) + "\n")


class Printed(NamedTuple):
    """What the command prints."""

    totals: dict[str, Any]
    warnings: str


@pytest.fixture
def score(tmp_path: Path, capsys) -> Callable[..., Printed]:
    """score(run, files…) → `Printed`. The table is FOLDER/scores/scores.parquet."""

    def run_command(run: Path, *files: Path) -> Printed:
        output = tmp_path / "scores" / "scores.parquet"
        command = ["score", *map(str, [run, *files]), f"--output={output}", "--json"]
        assert main(command) == 0
        printed = capsys.readouterr()
        return Printed(json.loads(printed.out, parse_constant=pytest.fail), printed.err)

    return run_command


@pytest.mark.parametrize(("row_group", "n_row_groups"), [(scores_table.ROW_GROUP, 1), (1, 3)])
def test_the_table_has_every_token_of_every_text(
    run_with_text: Path, tmp_path: Path, score, row_group: int, n_row_groups: int, monkeypatch
) -> None:
    monkeypatch.setattr(scores_table, "ROW_GROUP", row_group)
    first_text, *other_texts = TEXTS
    text_file = tmp_path / "text.txt"
    text_file.write_text(first_text, encoding="utf-8")
    lines_file = tmp_path / "texts.jsonl"
    write_json_lines(lines_file, other_texts)

    totals, _ = score(run_with_text, text_file, lines_file)

    table_file = pq.ParquetFile(tmp_path / "scores" / "scores.parquet")
    assert table_file.num_row_groups == n_row_groups
    table = table_file.read()
    rows = table.to_pylist()
    documents: list[list[Row]] = [[], [], []]
    for row in rows:
        documents[row["document"]].append(row)
    sources = [text_file, lines_file, lines_file]
    for document, text, file in zip(documents, TEXTS, sources, strict=True):
        check_document(document, text, file)
        has_partial_characters = "" in (row["text"] for row in document)
        assert has_partial_characters == (text == TEXTS[1])
    nats = -sum(row["log_likelihood"] for row in rows)
    n_bytes = len("".join(TEXTS).encode())
    bits = nats / math.log(2)
    assert totals["documents"] == 3
    assert totals["tokens"] == len(rows)
    assert totals["scored"] == len(rows)
    assert totals["bytes"] == n_bytes
    assert totals["nats"] == pytest.approx(nats)
    assert totals["bits_per_byte"] == pytest.approx(bits / n_bytes)
    record = json.loads(table.schema.metadata[b"anlit"])
    assert record["length"] == 16
    assert record["stride"] == 8
    assert record["architecture"] == "GPT"
    assert record["command"].startswith("anlit score ")


def check_document(rows: list[Row], text: str, file: Path) -> None:
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


def test_totals_without_documents_are_null(run_with_text: Path, tmp_path: Path, score) -> None:
    empty_file = tmp_path / "empty.jsonl"
    empty_file.touch()

    totals, _ = score(run_with_text, empty_file)

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
    file.write_text('{"text": "the cat"}\n{}')

    message = refusal("score", run_with_text, file, "--output", tmp_path / "out.parquet")

    assert 'text.jsonl, line 2: the field "text" is missing' in message
    assert not list(tmp_path.glob("*.parquet*"))


def test_standard_input_is_one_text(
    run_with_text: Path, tmp_path: Path, score, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[0], encoding="utf-8")
    totals_of_file = score(run_with_text, file).totals
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXTS[0]))

    totals = score(run_with_text, Path("-")).totals

    assert totals == totals_of_file
    assert totals["documents"] == 1


NO_BITS = "gives back 1 of 1 documents as another text, so bits per byte are not known"


def test_a_text_that_the_tokenizer_changes_has_no_bits_per_byte(tmp_path: Path, score) -> None:
    tokenizer = train_bpe(TEXTS, VOCABULARY - 10)
    tokenizer.normalizer = normalizers.Lowercase()
    run = make_run_with_text(tmp_path, GPT, tokenizer)
    file = tmp_path / "text.txt"
    file.write_text("The Cat sat")

    totals, warnings = score(run, file)

    assert totals["changed"] == 1
    assert totals["bits_per_byte"] is None
    assert NO_BITS in warnings


def test_a_text_that_the_tokenizer_gives_back_has_bits_per_byte(
    run_with_text: Path, tmp_path: Path, score
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat")

    totals, warnings = score(run_with_text, file)

    assert totals["changed"] == 0
    assert totals["bits_per_byte"] > 0
    assert "bits per byte" not in warnings
