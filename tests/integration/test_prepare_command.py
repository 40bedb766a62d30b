"""`anlit prepare` as users meet it, and each corpus from its files in the hub's layout to the first training steps."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit import data as corpora
from anlit.cli import main
from anlit.data.preparation import catalogue, runner
from anlit.data.preparation.catalogue import CORPORA, Options, python_files
from anlit.errors import UserError
from anlit.targets import IGNORED
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import hashes, plain_tokenizer, read_json, read_stream, read_texts, scratch, train_tokenizer
from tests.integration.conftest import fit_arguments, last_checkpoint
from tests.integration.conftest import run as run_command

LENGTH = 32
SHIPPED = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text for text in documents(50, seed=11) if len(text) < 10_000]


@pytest.fixture
def source(texts: list[str], tmp_path: Path) -> Path:
    layouts.openwebtext(tmp_path / "hub", texts)
    return tmp_path / "hub"


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error; everything before it is not one, and no traceback."""
    *before, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("anlit: error: ")
    assert last.count("anlit: error: ") == 1
    assert not [line for line in before if "rror" in line or "Traceback" in line]
    return last


def test_help_lists_corpora_and_options_without_torch() -> None:
    code = "import sys; from anlit.cli import main\ntry: main(['prepare', '--help'])\n"
    code += "except SystemExit as stop: assert stop.code in (0, None)\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in (*CORPORA, "--output", "--source", "--on_bad", "--shard", "--workers", "--verify", "--tokenizer"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["Nonsense"],
            "There is no corpus Nonsense: choose one of SlimPajama, OpenWebText, FineWeb, FineWebBin, TextF",
        ),
        ([], "anlit prepare needs corpus: anlit prepare --help lists the options"),
        (["FineWeb", "--shard", "2/2"], "--shard must be i/n with 0 ≤ i < n, such as 0/4, not 2/2."),
        (["FineWeb", "--shard", "-1/2"], "--shard"),
        (["FineWeb", "--shard", "1"], "not 1."),
        (["FineWeb", "--shard", "a/b"], "not a/b."),
        (["FineWeb", "--workers", "0"], "--workers must be at least 1, not 0."),
        (["FineWeb", "--workers", "two"], "--workers two is of the wrong type: give an integer"),
        (["FineWeb", "--on_bad", "ignore"], "--on_bad ignore is not known: choose one of stop, skip"),
        (["FineWeb", "--no-such-option", "3"], "--no-such-option is not an option of anlit prepare"),
        (["FineWeb", "--part", "sample-1BT"], "--part sample-1BT is not known: choose one of sample-10BT"),
        (["FineWebBin", "--part", "1B"], "--part 1B is not known: choose one of 10B, 100B"),
        (["FineWeb", "--val_tokens", "0"], "--val_tokens must be at least 1, not 0"),
        (["TextFiles"], "TextFiles needs --source, the folder that holds the texts."),
        (["TextFiles", "--source", ".", "--val_fraction", "1"], "val_fraction must be between 0 and 1, not 1.0"),
        (["TextFiles", "--source", "."], "to the folder with the text, or --pattern"),
        (["SlimPajama", "--source", "nowhere"], "There is no folder nowhere: set --source"),
        (["SlimPajama", "--source", ".", "--tokenizer", "gpt3"], "There is no tokenizer at gpt3"),
        (
            ["SlimPajama", "--source", ".", "--max_document_bytes", "0"],
            "--max_document_bytes must be at least 1, not 0",
        ),
        (["FineWebBin", "--source", ".", "--tokenizer", "bpe"], "--tokenizer bpe is for text"),
    ],
)
def test_a_wrong_command_is_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *arguments]) == 2
    line = last_line(capsys)
    assert says in line
    assert len(line) < 500
    assert hashes(tmp_path) == {}


def test_what_is_said(
    source: Path, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "OpenWebText", "--source", "hub", "--output", "my out", "--tokenizer", tokenizer]
    command += ["--val_fraction", "0.2", "--workers", "1"]
    assert main(command) == 0
    manifest = read_json(tmp_path / "my out" / "manifest.json")
    said = capsys.readouterr().err
    counts = f"{manifest['train']['tokens']:,} tokens in train, {manifest['val']['tokens']:,} tokens in val"
    assert f"my out: {counts}; {manifest['documents']:,} documents, 0 skipped." in said
    assert main(command) == 0
    assert "my out is finished, with" in capsys.readouterr().err


def test_the_command_in_the_manifest_makes_the_same_folder(
    source: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "OpenWebText", "--source", "hub", "--output", "my out", "--tokenizer", tokenizer]
    assert main([*command, "--val_fraction", "0.2", "--workers", "2", "--on_bad", "skip", "--shard", "0/1"]) == 0
    words = read_json(tmp_path / "my out" / "manifest.json")["command"]
    assert words == (
        f"anlit prepare OpenWebText --output 'my out' --source hub --tokenizer {tokenizer} --val_fraction 0.2 "
        "--on_bad skip"
    )
    before = hashes(tmp_path / "my out")
    (tmp_path / "my out").rename(tmp_path / "first")
    subprocess.run(f"{sys.executable} -m {words}", shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert hashes(tmp_path / "my out") == before


def test_shards_from_the_command_line(
    source: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "OpenWebText", "--source", "hub", "--output", "out", "--tokenizer", tokenizer]
    command += ["--val_fraction", "0.2"]
    assert main([*command, "--shard", "0/2"]) == 0
    assert main([*command, "--shard=1/2"]) == 0
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_verify(
    source: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "OpenWebText", "--source", "hub", "--output", "out", "--tokenizer", tokenizer]
    command += ["--val_fraction", "0.2"]
    assert main(command) == 0
    before = hashes(tmp_path / "out")
    chunk = next((tmp_path / "out" / "train").glob("chunk-*.bin"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\xff")
    assert main([*command, "--verify"]) == 0
    assert hashes(tmp_path / "out") == before
    assert f"{chunk.name} is missing or damaged" in capsys.readouterr().err


def slimpajama(folder: Path, texts: list[str]) -> list[str]:
    layouts.slimpajama(folder, {"train": texts[:30], "validation": texts[30:37], "test": texts[37:]})
    return []


def openwebtext(folder: Path, texts: list[str]) -> list[str]:
    layouts.openwebtext(folder, texts)
    return ["--val_fraction", "0.2"]


def fineweb(folder: Path, texts: list[str]) -> list[str]:
    layouts.fineweb(folder, texts)
    return ["--val_tokens", "500"]


def fineweb_bin(folder: Path, texts: list[str]) -> list[str]:
    rng = np.random.default_rng(0)
    some = [rng.integers(0, 50256, rng.integers(1, 300)).tolist() for _ in range(60)]
    layouts.fineweb_bin(folder, some, tokens_per_file=3000)
    return []


def text_files(folder: Path, texts: list[str]) -> list[str]:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return ["--val_fraction", "0.2"]


def stream_of(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split in the manifest's order of subsets."""
    subsets = read_json(folder / "manifest.json")[split].get("subsets", {"": None})
    return np.concatenate([read_stream(folder, f"{split}/{name}".rstrip("/")) for name in subsets])


def assert_reads(data: Any, folder: Path, val_tokens: int | None) -> None:
    """The DataModule gives the very tokens of the chunks: every block once, validation to its end."""
    data.setup()
    train, val = stream_of(folder, "train"), stream_of(folder, "val")
    if "subsets" not in read_json(folder / "manifest.json")["train"]:
        rows = torch.cat([batch.tokens for batch in data.train_dataloader()])
        assert len(rows) == (len(train) - 1) // LENGTH // 4 * 4
        assert rows.flatten().tolist() == train[: rows.numel()].tolist()
        targets = torch.cat([batch.targets for batch in data.val_dataloader()]).flatten()
        counted = targets[targets != IGNORED].tolist()
        assert counted == val[1 : len(counted) + 1].tolist()
        assert len(counted) == min(val_tokens or len(val), len(val) - 1)
    assert data.manifest["train"]["tokens"] == len(train)
    assert data.manifest["val"]["tokens"] == len(val)


def assert_fits(folder: Path, run_dir: Path, vocab_size: int, *arguments: str) -> None:
    """Two steps and a validation; the run's record has the counts of the manifest."""
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    extra = [f"--model.vocab_size={vocab_size}", *arguments, *steps]
    assert run_command(fit_arguments(folder, run_dir, *extra, model="GPT")) == 0
    assert last_checkpoint(run_dir)["global_step"] == 2
    record, manifest = json.loads((run_dir / "run.json").read_text()), read_json(folder / "manifest.json")
    for key in ("documents", "bytes", "tokens", "train", "val", "content_sha256"):
        assert record["data"][key] == manifest[key]
    with (run_dir / "metrics.csv").open(newline="") as file:
        logged = [row for row in csv.DictReader(file) if row.get("val/loss")]
    assert float(logged[-1]["val/loss"]) > 0
    assert bool(logged[-1].get("val/bits_per_byte")) == (manifest["bytes"] is not None)


@pytest.mark.parametrize(
    ("corpus", "write", "config", "val_tokens"),
    [
        ("SlimPajama", slimpajama, "slimpajama.yaml", None),
        ("OpenWebText", openwebtext, "openwebtext.yaml", None),
        ("FineWeb", fineweb, "fineweb.yaml", 500),
        ("FineWebBin", fineweb_bin, "fineweb_bin.yaml", 1000),
    ],
)
def test_from_the_hub_s_files_to_training(
    corpus: str, write: Any, config: str, val_tokens: int | None, texts: list[str], tokenizer: str, tmp_path: Path
) -> None:
    options = write(tmp_path / "hub", texts)
    vocab_size, chosen = (50257, "none") if corpus == "FineWebBin" else (800, tokenizer)
    folder = tmp_path / "out"
    command = ["prepare", corpus, "--source", str(tmp_path / "hub"), "--output", str(folder), "--tokenizer", chosen]
    assert main([*command, *options]) == 0
    manifest = read_json(folder / "manifest.json")
    if corpus == "FineWebBin":
        parts = {file.name: np.frombuffer(file.read_bytes(), "<u2")[512:] for file in (tmp_path / "hub").iterdir()}
        assert manifest["tokens"] == sum(len(part) for part in parts.values())
        assert stream_of(folder, "val").tolist() == parts["fineweb_val_000000.bin"].tolist()
    else:
        assert manifest["tokens"] == len(plain_tokenizer(tokenizer).tokens(texts))
        assert manifest["bytes"] == sum(len(text.encode()) for text in texts)
        assert manifest["documents"] == len(texts)
    settings = {"context_length": LENGTH, "batch_size": 4, "shuffle": False}
    if val_tokens is not None:
        settings["val_tokens"] = val_tokens
    assert_reads(getattr(corpora, corpus)(str(folder), **settings), folder, val_tokens)
    sizes = ["--data.batch_size=4", "--data.num_workers=0"]
    assert_fits(folder, tmp_path / "run", vocab_size, f"--config={SHIPPED / config}", f"--data.path={folder}", *sizes)


def test_from_text_files_to_training(texts: list[str], tokenizer: str, tmp_path: Path) -> None:
    text_files(tmp_path / "text", texts)
    folder = tmp_path / "out"
    arguments = ["--data=TextFiles", f"--data.source={tmp_path / 'text'}", f"--data.path={folder}"]
    arguments += ["--data.vocab_size=300", "--data.val_fraction=0.2"]
    assert_fits(folder, tmp_path / "run", 300, *arguments)
    found = read_texts(folder, "train") + read_texts(folder, "val")
    assert sorted(found) == sorted(texts)
    settings: dict[str, Any] = {"context_length": LENGTH, "batch_size": 4, "shuffle": False}
    data = corpora.TextFiles(str(tmp_path / "text"), str(folder), vocab_size=300, val_fraction=0.2, **settings)
    data.prepare_data()
    assert_reads(data, folder, None)


def test_text_files_prepared_by_the_command_are_those_of_the_data_module(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = text_files(tmp_path / "text", texts)
    command = ["prepare", "TextFiles", "--source", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    assert main([*command, "--vocab_size", "300", *options]) == 0
    monkeypatch.setattr(runner, "Runner", None)  # nothing is made again
    corpora.TextFiles(str(tmp_path / "text"), str(tmp_path / "out"), vocab_size=300, val_fraction=0.2).prepare_data()


def test_from_python_sources_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = python_files(include_site_packages=False)
    few = {label: path for label, path in library.items() if label.startswith("json/")}
    monkeypatch.setattr(catalogue, "python_files", lambda include_site_packages: few)
    folder = tmp_path / "out"
    arguments = ["--data=PythonSources", f"--data.path={folder}", "--data.vocab_size=300", "--data.val_fraction=0.3"]
    assert_fits(folder, tmp_path / "run", 300, *arguments)
    found = read_texts(folder, "train") + read_texts(folder, "val")
    assert sorted(found) == sorted({path.read_bytes().decode() for path in few.values()} - {""})


def test_training_on_what_is_not_prepared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = f"prepare it with `anlit prepare FineWeb --output {tmp_path / 'nowhere'}`, or set --data.path"
    assert run_command(fit_arguments(tmp_path / "nowhere", tmp_path / "run", "--data=FineWeb")) == 2
    assert said in capfd.readouterr().err
    for corpus in ("SlimPajama", "OpenWebText", "FineWeb", "FineWebBin"):
        with pytest.raises(UserError, match=f"nowhere with {corpus}: prepare it with `anlit prepare {corpus} "):
            getattr(corpora, corpus)(str(tmp_path / "nowhere")).prepare_data()


def test_options_and_command_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command gives by default is what the data modules and other callers give."""
    given: list[Options] = []

    def remember(options: Options) -> None:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setitem(CORPORA, "FineWeb", remember)
    assert main(["prepare", "FineWeb"]) == 1
    assert given == [Options()]
