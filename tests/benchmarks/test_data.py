"""`anlit benchmark data` on an input of almost nothing: that it runs and what it writes, not how fast it is."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.benchmarks.command import main
from anlit.benchmarks.data import material, parts
from anlit.benchmarks.data.texts import read_slimpajama, write_slimpajama
from anlit.benchmarks.data.trials import TRIALS
from anlit.benchmarks.process import ProcessError, is_installed, measure_once
from anlit.data import TokenShards
from anlit.data.preparation import catalogue
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError

TINY = ["--megabytes", "0.3", "--tokens", "400000", "--rounds", "2", "--seconds", "0.05", "--memory_seconds", "0.5"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Trials without a process for each, which takes seconds to import torch. Returns (program, trial) as they run."""
    ran = []

    def run(module: str, name: str, python: str | None = None, **arguments: Any) -> dict[str, Any]:
        ran.append(("anlit" if module == parts.OURS else "litgpt", name))
        if module == parts.OURS:
            return json.loads(json.dumps(TRIALS[name](**arguments)))
        assert python == "some-python"
        if name == "prepare":
            Path(arguments["output"]).mkdir(parents=True)
        return {"tokens": 100, "seconds": 1.0, "cpu_seconds": 1.0, "versions": {"litgpt": "0"}}

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(parts, "measure_once", run)
    monkeypatch.setattr(parts, "cores", lambda: 2)
    monkeypatch.setattr("anlit.benchmarks.data.command.python_of_peer", lambda package, python: python)
    return ran


def test_all_parts(tmp_path: Path, in_this_process: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--folder", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    assert main(["data", *TINY, *folders, "--peer_python", "some-python"]) == 0
    record = json.loads((tmp_path / "out" / "data.json").read_text())
    assert record["settings"]["rounds"] == 2
    rows = [(m["part"], m["program"], m["workers"]) for m in record["measurements"]]
    assert rows == [
        ("prepare", "encode_batch", 1),
        *[("prepare", program, workers) for workers in (1, 2) for program in ("anlit", "litgpt")],
        ("stream", "memmap", 0),
        *[
            ("stream", program, workers)
            for workers in (0, 1, 2)
            for program in ("anlit", "litgpt", "litgpt, raw blocks")
        ],
        ("memory", "anlit", 2),
        ("wait", "anlit, 0.6M/s", 4),
        ("wait", "anlit, 5M/s", 4),
        *[(part, "anlit", workers) for part in ("first batch", "first batch at 90%") for workers in (0, 2)],
    ]
    for measurement in record["measurements"]:
        if measurement["part"] in ("prepare", "stream"):
            assert len(measurement["rounds"]) == len(measurement["tokens_per_second"]["values"]) == 2
    check_same_text(record["measurements"])
    assert not (tmp_path / "work" / "prepared").exists()
    check_turns(in_this_process)
    assert "From text to batches" in capsys.readouterr().out


def check_same_text(measurements: list[dict[str, Any]]) -> None:
    """Each of our programs encoded the same documents into as many tokens."""
    rows = [m for m in measurements if m["part"] == "prepare" and m["program"] != "litgpt"]
    assert len({(result["tokens"], result["documents"]) for row in rows for result in row["rounds"]}) == 1


def check_turns(trials: list[tuple[str, str]]) -> None:
    """Every program streams once in each round, and the second round begins with the second one."""
    first = [("anlit", "memmap"), *[("anlit", "stream"), ("litgpt", "stream"), ("litgpt", "stream")] * 3]
    assert [trial for trial in trials if trial[1] in ("memmap", "stream")] == [*first, *first[1:], first[0]]


def test_a_trial_in_its_own_process(tmp_path: Path) -> None:
    written = write_slimpajama(tmp_path / "text", 0.1, 1)
    texts = list(read_slimpajama(tmp_path / "text"))
    tokenizer = train_bpe(texts, 300)
    arguments = {"input": str(tmp_path / "text"), "tokenizer": str(tmp_path)}
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = measure_once(parts.OURS, "bare", **arguments)
    assert found["documents"] == len(texts) == written["documents"]
    assert found["tokens"] == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    assert found["cpu_seconds"] > 0
    assert found["seconds"] > 0


@pytest.mark.skipif(is_installed("litgpt"), reason="litgpt is here")
def test_litgpts_program_starts_in_another_python() -> None:
    """It imports its neighbours, and fails for lack of litgpt alone."""
    with pytest.raises(ProcessError, match=r"`stream` ended: .*No package metadata was found for litgpt$"):
        measure_once(parts.LITGPT, "stream", sys.executable, path="nowhere")


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"choose one of attention, .*data"):
        main(["dta"])
    options = ["data", *TINY, "--folder", str(tmp_path), "--output", str(tmp_path)]
    with pytest.raises(UserError, match="--parts steam is not known: choose from prepare"):
        main([*options, "--parts", "prepare,steam"])
    with pytest.raises(UserError, match="--peer_python"):
        main([*options, "--peer_python", str(tmp_path / "no")])


def test_random_tokens_become_a_prepared_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "FILE_TOKENS", 10_000)
    monkeypatch.setattr(material, "VAL_TOKENS", 5_000)
    given = argparse.Namespace(folder=tmp_path, tokens=25_000)
    shards = TokenShards(str(material.shards(given)), batch_size=2, context_length=100, shuffle=False)
    assert shards.manifest["train"]["tokens"] == 25_000
    assert 25 <= shards.manifest["train"]["documents"] <= 28
    shards.setup("fit")
    rng = np.random.default_rng(0)
    rng.integers(0, 50_256, 5_000, dtype="<u2")
    rng.integers(0, 5_000, 5)
    tokens = next(iter(shards.train_dataloader())).tokens.flatten()
    drawn = rng.integers(0, 50_256, 10_000, dtype="<u2")[:200]
    assert np.mean(tokens.numpy() == drawn) > 0.98  # the others end documents
    monkeypatch.setattr(material, "prepare", None)
    assert material.shards(given) == Path(shards.path)


def test_a_repeated_text_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(5):
        (library / f"{number}.py").write_text(f"x = {number}  # größer\n" * 100)
    (library / "copy.py").write_text("x = 0  # größer\n" * 100)
    (library / "empty.py").write_text("")
    (library / "latin1.py").write_bytes("größer".encode("latin-1"))
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(library))
    monkeypatch.setattr(catalogue.sysconfig, "get_paths", lambda: paths)
    written = write_slimpajama(tmp_path / "text", 0.02, 1)
    texts = list(read_slimpajama(tmp_path / "text"))
    assert len(texts) == len(set(texts)) == written["documents"] > 10
    assert sum(len(text.encode()) for text in texts) == written["bytes"] >= 20_000
    assert sum("# repetition 2\n" in text for text in texts) == 5
