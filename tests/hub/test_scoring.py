"""`anlit score`: each log-likelihood is that of a pass over its window, however windows are batched; the table."""

import json
import math
from pathlib import Path

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
from tests.hub.conftest import make_run_with_text
from tests.nn.models.tiny import decoder, random_tokens

LENGTH, END = 16, 3
DOCUMENTS = [random_tokens(n, seed=n).numpy() for n in (1, 2, 15, 16, 17, 40, 3)]
TEXTS = ["the cat sat on the mat by the dog " * 12, "naïve café – ☕ 🐈 for the cats", "x"]


def by_hand(
    model: Decoder, tokens: np.ndarray, stride: int, separator: int | None, seen: bool
) -> list[tuple]:
    """(log-likelihood, rank, context) of each token, each by a forward pass of its own over its window."""
    row = tokens if separator is None else np.concatenate(([separator], tokens))
    n_before = len(row) - len(tokens)
    scores: list[tuple] = [(np.nan, 0, 0)][n_before:]
    for target in range(1, len(row)):
        further = math.ceil(max(0, target - LENGTH) / stride)  # windows after the first
        begin = max(0, min(len(row) - 1, LENGTH + further * stride) - LENGTH)
        hidden = bool(n_before and begin == 0 and target > 1 and not seen)
        with torch.no_grad():
            logits = model(torch.from_numpy(row[begin + hidden : target])[None])[0, -1].log_softmax(
                -1
            )
        rank = int((logits > logits[row[target]]).sum()) + 1
        scores.append(
            (logits[row[target]].item(), rank, target - n_before - max(0, begin - n_before))
        )
    return scores


@pytest.mark.parametrize(("separator", "changes", "stride", "seen"), [
    (Separator(END, "end"), {}, 6, False), (Separator(END, "start"), {}, 1, True),
    (Separator(END, "end"), {"document_masking": False}, 16, True), (Separator(), {"attention": LogN()}, 6, True),
], ids=["end", "start", "unmasked", "no separator"])  # fmt: skip
def test_scores_are_those_of_single_passes(
    separator: Separator, changes, stride: int, seen: bool
) -> None:
    model = decoder(AnGPT, **{"attention": ScaleInvariant(), **changes})
    documents = [np.where(tokens == END, END + 1, tokens) for tokens in DOCUMENTS]
    expected = [by_hand(model, tokens, stride, separator.token, seen) for tokens in documents]
    for batch_size in (1, 3, None):
        for scores, own in zip(
            score_documents(model, documents, LENGTH, stride, separator, batch_size),
            expected,
            strict=True,
        ):
            log_likelihood, rank, n_context = zip(*own, strict=True)
            np.testing.assert_allclose(scores.log_likelihood, log_likelihood, rtol=1e-5, atol=1e-5)
            assert (scores.rank.tolist(), scores.n_context.tolist()) == (
                list(rank),
                list(n_context),
            )


def test_positions_that_follow_the_length_do_not_depend_on_the_batch() -> None:
    model = decoder(GPT, attention=ScaleInvariant(), positions=DynamicNTK(training_length=8))
    together = list(score_documents(model, DOCUMENTS, LENGTH, 6))
    for tokens, scores in zip(DOCUMENTS, together, strict=True):
        (alone,) = score_documents(model, [tokens], LENGTH, 6, batch_size=1)
        np.testing.assert_allclose(
            alone.log_likelihood, scores.log_likelihood, rtol=1e-5, atol=1e-5
        )


def test_the_table_has_every_token_of_every_text(run: Path, tmp_path: Path, capsys) -> None:
    files, output = (
        [tmp_path / "text.txt", tmp_path / "texts.jsonl"],
        tmp_path / "scores" / "out.parquet",
    )
    files[0].write_text(TEXTS[0], encoding="utf-8")
    files[1].write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]), encoding="utf-8"
    )
    assert main(["score", str(run), *map(str, files), "--output", str(output), "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)
    table = pq.read_table(output)
    rows = table.to_pylist()
    for number, text in enumerate(TEXTS):
        own = [row for row in rows if row["document"] == number]
        assert [row["position"] for row in own] == list(range(len(own)))
        assert {row["source"].split(", ")[0] for row in own} == {str(files[min(number, 1)])}
        content = text.encode()
        assert (own[0]["byte_start"], own[-1]["byte_end"]) == (0, len(content))
        for row in own:
            assert row["text"] in content[row["byte_start"] : row["byte_end"]].decode()
        assert "".join(row["text"] for row in own) == text
        assert any(row["text"] == "" for row in own) == (number == 1)  # a part of a character
    assert [totals[key] for key in ("documents", "tokens", "scored")] == [3, len(rows), len(rows)]
    assert totals["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert totals["nats"] == pytest.approx(-sum(row["log_likelihood"] for row in rows))
    assert totals["bits_per_byte"] == pytest.approx(totals["nats"] / math.log(2) / totals["bytes"])
    record = json.loads(table.schema.metadata[b"anlit"])
    assert (record["length"], record["stride"], record["architecture"]) == (16, 8, "GPT")
    assert record["command"].startswith("anlit score ")


def test_totals_of_nothing_are_null(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "none.jsonl").touch()
    given = [
        str(run),
        str(tmp_path / "none.jsonl"),
        "--output",
        str(tmp_path / "o.parquet"),
        "--json",
    ]
    assert main(["score", *given]) == 0
    totals = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    shares, counts = (
        ("nats_per_token", "bits_per_byte"),
        ("documents", "changed", "tokens", "scored", "bytes", "nats"),
    )
    assert totals == dict.fromkeys(shares) | dict.fromkeys(counts, 0)


def test_a_text_that_is_missing_is_named_and_no_table_written(
    run: Path, tmp_path: Path, refusal
) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n{}")
    said = refusal("score", run, tmp_path / "text.jsonl", "--output", tmp_path / "out.parquet")
    assert 'text.jsonl, line 2: the field "text" is missing' in said
    assert not list(tmp_path.glob("*.parquet*"))


def test_a_text_that_does_not_come_back_has_no_bits_per_byte(tmp_path: Path, capsys) -> None:
    tokenizer = train_bpe(TEXTS, VOCABULARY - 10)
    tokenizer.normalizer = normalizers.Lowercase()
    run = make_run_with_text(tmp_path, GPT, tokenizer)
    for text, n_changed in (("the cat sat", 0), ("The Cat sat", 1)):
        (tmp_path / "text.txt").write_text(text)
        output = ["--output", str(tmp_path / "o.parquet"), "--json"]
        assert main(["score", str(run), str(tmp_path / "text.txt"), *output]) == 0
        printed = capsys.readouterr()
        totals = json.loads(printed.out)
        assert totals["changed"] == n_changed
        assert (totals["bits_per_byte"] is None) == bool(n_changed)
        said = "gives back 1 of 1 documents as another text, so bits per byte are not known"
        assert (said in printed.err) == bool(n_changed)
