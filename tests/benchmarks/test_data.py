"""`anlit benchmark data` on an input of almost nothing: that it runs and what it writes, not how fast it is."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.benchmarks.data import benchmark, trials
from anlit.benchmarks.process import measure_once
from anlit.commands.benchmark import main
from anlit.data import TokenShards
from anlit.data.preparation import catalogue
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files, one of them twice, one empty and one that is not UTF-8."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.py").write_text(f"x = {number}  # größer\n" * 100)
    (folder / "copy.py").write_text("x = 0  # größer\n" * 100)
    (folder / "empty.py").write_text("")
    (folder / "latin1.py").write_bytes("größer".encode("latin-1"))
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(folder))
    monkeypatch.setattr(catalogue.sysconfig, "get_paths", lambda: paths)
    return folder


def test_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Trials in this process: one of its own takes seconds to import torch."""
    ran = []

    def here(module: str, name: str, **arguments: Any) -> dict[str, float]:
        assert module == benchmark.TRIALS
        ran.append(name)
        return getattr(trials, name)(**arguments)

    monkeypatch.setattr(benchmark, "measure_once", here)
    monkeypatch.setattr(benchmark, "cores", lambda: 2)
    monkeypatch.setattr(benchmark, "VOCAB_SIZE", 300)
    monkeypatch.setattr(benchmark, "STREAMING_WORKERS", (0, 1))
    options = ["--tokens", "400000", "--rounds", "2", "--seconds", "0.05", "--output", str(tmp_path / "out")]
    assert main(["data", *options]) == 0
    record = json.loads((tmp_path / "out" / "data.json").read_text())
    prepare, stream = (group["rows"] for group in record["groups"])
    assert [row["label"] for row in prepare] == ["encode_batch alone", "anlit, workers: 1", "anlit, workers: 2"]
    assert [row["label"] for row in stream] == [
        f"{name}, workers: {workers}" for workers in (0, 1) for name in ("litdata, raw blocks", "anlit")
    ]
    for row in (*prepare, *stream):
        assert row["reason"] is None
        assert len(row["seconds"]["token"]["values"]) == len(row["seconds"]["processor"]["values"]) == 2
    assert [row["beside"]["token"]["median"] for row in stream if "litdata" in row["label"]] == [1, 1]
    first = ["bare", "prepare", "prepare"]
    assert ran == [*first, *first[1:], first[0], *["litdata", "stream"] * 2, *["stream", "litdata"] * 2]
    assert "processor time ÷ other's" in capsys.readouterr().out


def test_a_trial_in_its_own_process(tmp_path: Path) -> None:
    train_bpe(trials.texts(), 300).save(str(tmp_path / "tokenizer.json"))
    trials.prepare(str(tmp_path / "out"), str(tmp_path / "tokenizer.json"), 1)
    found = measure_once(benchmark.TRIALS, "stream", path=str(tmp_path / "out"), workers=0, batch_size=2, length=16,
                         seconds=0.05)  # fmt: skip
    assert found["token"] > 0
    assert found["processor"] > 0


def test_the_texts_are_the_documents_of_the_corpus(tmp_path: Path) -> None:
    """Different, not empty, UTF-8: as many as our preparation takes."""
    texts = list(trials.texts())
    assert len(texts) == len(set(texts)) == 40
    tokenizer = train_bpe(texts, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trials.prepare(str(tmp_path / "out"), str(tmp_path / "tokenizer.json"), 1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["documents"] == 40
    assert manifest["tokens"] == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"choose one of attention, .*data"):
        main(["dta"])
    with pytest.raises(UserError, match="--parts steam is not known: choose from prepare"):
        main(["data", "--parts", "prepare,steam", "--output", str(tmp_path)])


def test_random_tokens_become_a_prepared_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "FILE_TOKENS", 10_000)
    monkeypatch.setattr(benchmark, "VAL_TOKENS", 5_000)
    given = argparse.Namespace(folder=tmp_path, tokens=25_000)
    shards = TokenShards(str(benchmark.shards(given)), batch_size=2, context_length=100, shuffle=False)
    assert shards.manifest["train"]["tokens"] == 25_000
    assert 25 <= shards.manifest["train"]["documents"] <= 28
    shards.setup("fit")
    rng = np.random.default_rng(0)
    rng.integers(0, 50_256, 5_000, dtype="<u2")
    rng.integers(0, 5_000, 5)
    tokens = next(iter(shards.train_dataloader())).tokens.flatten()
    drawn = rng.integers(0, 50_256, 10_000, dtype="<u2")[:200]
    assert np.mean(tokens.numpy() == drawn) > 0.98  # the others end documents
    monkeypatch.setattr(benchmark, "prepare_folder", None)
    assert benchmark.shards(given) == Path(shards.path)
