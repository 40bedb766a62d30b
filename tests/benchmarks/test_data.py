"""`anlit benchmark data` on an input of almost nothing: that it runs and what it writes, not how fast it is."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.benchmarks import data, data_rounds, data_table
from anlit.benchmarks.command import main
from anlit.benchmarks.data_trials import TRIALS
from anlit.benchmarks.random_shards import CHUNK_TOKENS, END_OF_DOCUMENT, random_shards
from anlit.benchmarks.record import run_trial, spread
from anlit.benchmarks.texts import python_sources_as_slimpajama, slimpajama_texts
from anlit.data import TokenShards
from anlit.data.shards import CHUNK_HEADER_BYTES
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError

TINY = ["--megabytes", "0.3", "--tokens", "400000", "--rounds", "2", "--seconds", "0.05", "--memory-seconds", "0.5"]
RATE = {"part", "program", "workers", "tokens_per_second", "rounds"}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Trials without a process for each, which takes seconds to import torch. Returns (program, trial) as they run."""
    ran = []

    def run(command: list[str], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        ran.append(("anlit" if command == data_rounds.OURS else "litgpt", name))
        if command == data_rounds.OURS:
            return json.loads(json.dumps(TRIALS[name](**arguments)))
        if name == "prepare":
            Path(arguments["output"]).mkdir(parents=True)
        return {"tokens": 100, "seconds": 1.0, "cpu_seconds": 1.0, "versions": {"litgpt": "0"}}

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(data_rounds, "run_trial", run)
    monkeypatch.setattr(data_rounds, "cores", lambda: 2)
    return ran


def test_all_parts(tmp_path: Path, in_this_process: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--folder", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    assert main(["data", *TINY, *folders, "--peer-python", "some-python"]) == 0
    record = json.loads((tmp_path / "out" / "data.json").read_text())
    assert record["environment"]["versions"]["python"]
    assert {"cpu", "cores", "memory_gb"} <= set(record["environment"]["hardware"])
    assert record["environment"]["git"]["commit"]
    assert record["peer"] == {"litgpt": "0"}
    assert record["settings"]["rounds"] == 2
    rows = [(m["part"], m["program"], m["workers"]) for m in record["measurements"]]
    assert rows == [
        ("prepare", "tokenizers encode_batch", 1),
        ("prepare", "tokenizers encode_batch_fast", 1),
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
            assert set(measurement) >= RATE
            assert len(measurement["rounds"]) == len(measurement["tokens_per_second"]["values"]) == 2
    check_same_text(record["measurements"])
    assert not (tmp_path / "work" / "prepared").exists()
    check_turns(in_this_process)
    assert "Targets" in capsys.readouterr().out


def check_same_text(measurements: list[dict[str, Any]]) -> None:
    """Each of our programs encoded the same documents into as many tokens."""
    rows = [m for m in measurements if m["part"] == "prepare" and m["program"] != "litgpt"]
    assert all(m["tokens_per_second_after_start"]["median"] >= m["tokens_per_second"]["median"] for m in rows)
    assert len({(result["tokens"], result["documents"]) for row in rows for result in row["rounds"]}) == 1


def check_turns(trials: list[tuple[str, str]]) -> None:
    """Every program streams once in each round, and the second round begins with the second one."""
    first = [("anlit", "memmap"), *[("anlit", "stream"), ("litgpt", "stream"), ("litgpt", "stream")] * 3]
    assert [trial for trial in trials if trial[1] in ("memmap", "stream")] == [*first, *first[1:], first[0]]


def test_a_trial_in_its_own_process(tmp_path: Path) -> None:
    counts = python_sources_as_slimpajama(tmp_path / "text", 0.1)
    texts = list(slimpajama_texts(tmp_path / "text"))
    tokenizer = train_bpe(texts, 300)
    arguments = {"input": str(tmp_path / "text"), "tokenizer": str(tmp_path), "method": "encode_batch"}
    with pytest.raises(UserError, match=r"There is no tokenizer at .*tokenizer\.json"):
        run_trial(data_rounds.OURS, "bare", arguments)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = run_trial(data_rounds.OURS, "bare", arguments)
    assert found["documents"] == len(texts) == sum(split["documents"] for split in counts.values())
    assert found["tokens"] == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    assert found["process_seconds"] > 0
    assert found["seconds"] > 0


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"choose one of attention, .*data"):
        main(["dta"])
    with pytest.raises(UserError, match="prepare"):
        main(["data", *TINY, "--folder", str(tmp_path), "--output", str(tmp_path), "--parts", "prepare,steam"])
    with pytest.raises(UserError, match="--peer-python"):
        data.main([*TINY, "--folder", str(tmp_path), "--output", str(tmp_path), "--peer-python", str(tmp_path / "no")])


def test_random_shards_are_a_prepared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anlit.benchmarks.random_shards.CHUNK_TOKENS", 10_000)
    manifest = random_shards(tmp_path / "shards", 25_000)
    assert manifest["train"]["chunks"] == 3
    chunks = json.loads((tmp_path / "shards/train/index.json").read_text())["chunks"]
    for chunk in chunks:
        assert zlib.crc32((tmp_path / "shards/train" / chunk["filename"]).read_bytes()) == chunk["crc32"]
    tokens = np.concatenate(
        [np.fromfile(tmp_path / "shards/train" / c["filename"], "<u2", offset=CHUNK_HEADER_BYTES) for c in chunks]
    )
    assert len(tokens) == 25_000
    assert (tokens == END_OF_DOCUMENT).sum() == manifest["train"]["documents"] > 0
    shards = TokenShards(str(tmp_path / "shards"), batch_size=2, context_length=100, shuffle=False)
    shards.setup("fit")
    assert next(iter(shards.train_dataloader())).tokens.flatten().tolist() == tokens[:200].tolist()
    assert random_shards(tmp_path / "shards", 25_000) == manifest
    with pytest.raises(UserError, match="--folder"):
        random_shards(tmp_path / "shards", 26_000)
    assert CHUNK_TOKENS > 10_000


def test_a_repeated_text_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(5):
        (library / f"{number}.py").write_text(f"x = {number}  # größer\n" * 100)
    (library / "copy.py").write_text("x = 0  # größer\n" * 100)
    (library / "empty.py").write_text("")
    (library / "latin1.py").write_bytes("größer".encode("latin-1"))
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(library))
    monkeypatch.setattr("anlit.benchmarks.texts.sysconfig.get_paths", lambda: paths)
    counts = python_sources_as_slimpajama(tmp_path / "text", 0.02)
    texts = list(slimpajama_texts(tmp_path / "text"))
    assert len(texts) == len(set(texts)) == sum(split["documents"] for split in counts.values()) > 10
    assert sum(len(text.encode()) for text in texts) == sum(split["bytes"] for split in counts.values()) >= 20_000
    assert sum("# repetition 2\n" in text for text in texts) == 5


def test_targets_judge_what_was_measured() -> None:
    def of(part: str, workers: int, **more: Any) -> dict[str, Any]:
        return {"part": part, "program": "anlit", "workers": workers, **more}

    ratio = {"per_worker": spread([0.8, 0.9, 0.95]), "per_cpu_second": spread([0.86])}
    slow = {"per_worker": spread([0.84]), "per_cpu_second": spread([0.9])}
    costly = {"per_worker": spread([0.9]), "per_cpu_second": spread([0.84])}
    memory = {"unique": [[60.0, 61.0], [60.0, 90.0]], "proportional": [[1.0], [1.0]]}
    found = data_table.targets(
        [
            of("prepare", 1, beside_encode_batch=ratio),
            of("prepare", 2, beside_encode_batch=slow),
            of("prepare", 4, beside_encode_batch=costly),
            of("stream", 2, tokens_per_second=spread([4e6, 6e6, 7e6]), beside_litgpt=spread([0.9])),
            of("memory", 2, megabytes=memory, growth_megabytes={"unique": [1.0, 30.0]}, seconds=[1.0, 2.0]),
            of("first batch", 0, seconds=spread([1.0]), import_seconds=spread([3.0])),
            of("first batch at 90%", 0, seconds=spread([5.5]), import_seconds=spread([3.0])),
        ]
    )
    assert [row["met"] for row in found] == [True, False, False, False, True, False, True, False]
    assert data_table.targets([of("stream", 0, tokens_per_second=spread([1.0]))])[0]["met"] is None
