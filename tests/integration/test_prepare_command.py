"""`anlit prepare` as users meet it, and each corpus from its files in the hub's layout to the first training steps."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from anlit.cli import main
from anlit.data import corpora
from anlit.data.preparation import executors
from anlit.data.preparation.recipes import CORPORA, Options
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import hashes, plain_tokenizer, read_json, read_texts, scratch, train_tokenizer
from tests.integration.conftest import fit_arguments, last_checkpoint, logged
from tests.integration.conftest import run as run_command

SHIPPED = Path(__file__).parents[2] / "configs" / "data"
Write = Callable[[Path, list[str]], object]


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
def command(texts: list[str], tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To prepare the folder `my out` from `hub`, from the folder that has both."""
    layouts.openwebtext(tmp_path / "hub", texts)
    monkeypatch.chdir(tmp_path)
    own = ["--source", "hub", "--output", "my out", "--tokenizer", tokenizer, "--val_fraction", "0.2"]
    return ["prepare", "OpenWebText", *own, "--workers", "1"]


def test_help_lists_corpora_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    shown = capsys.readouterr().out
    for name in (
        *CORPORA,
        "--output",
        "--source",
        "--on_bad",
        "--cluster",
        "--repo",
        "--workers",
        "--verify",
        "--tokenizer",
    ):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "anlit prepare needs corpus: anlit prepare --help lists the options"),
        ("FineWeb --workers 2 --cluster tcp://a:1", "--workers counts processes of this machine, and --cluster has"),
        ("Hub --repo allenai/c4", "Hub needs --repo and --files, such as --repo allenai/c4 --files"),
        ("Hub --repo c4 --files *", "--repo c4 is no dataset of the hub: give owner/name, such as allenai/c4."),
        ("FineWeb --workers 0", "--workers must be at least 1, not 0."),
        ("FineWeb --workers two", "--workers two is of the wrong type: give an integer"),
        ("FineWeb --part sample-1BT", "--part sample-1BT is not known: choose one of sample-10BT"),
        ("FineWeb --val_tokens 0", "--val_tokens must be at least 1, not 0"),
        ("TextFiles", "TextFiles needs --source, the folder that holds the texts."),
        ("TextFiles --source . --val_fraction 1", "val_fraction must be between 0 and 1, not 1.0"),
        ("SlimPajama --source nowhere", "There is no folder nowhere: set --source"),
        ("SlimPajama --source . --tokenizer gpt3", "There is no tokenizer at gpt3"),
        ("SlimPajama --source . --max_document_bytes 0", "--max_document_bytes must be at least 1, not 0"),
        ("FineWebBin --source . --tokenizer bpe", "--tokenizer bpe is for text"),
    ],
)
def test_a_wrong_command_is_one_sentence(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/integration/mistakes.py has more."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("anlit: error: ")
    assert says in line
    assert hashes(tmp_path) == {}


def test_what_is_said_and_what_is_verified(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    out, before = tmp_path / "my out", hashes(tmp_path / "my out")
    manifest = read_json(out / "manifest.json")
    counts = f"{manifest['train']['tokens']:,} tokens in train, {manifest['val']['tokens']:,} tokens in val"
    assert f"my out: {counts}; {manifest['documents']:,} documents, 0 skipped." in capsys.readouterr().err
    assert main(command) == 0
    assert "my out is finished, with" in capsys.readouterr().err
    chunk = next((out / "train").glob("chunk-*.bin"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\xff")
    assert main([*command, "--verify"]) == 0
    assert f"{chunk.name} is missing or damaged" in capsys.readouterr().err
    assert hashes(out) == before


def test_the_command_in_the_manifest_makes_the_same_folder(command: list[str], tokenizer: str, tmp_path: Path) -> None:
    assert main([*command, "--on_bad", "skip"]) == 0
    words = read_json(tmp_path / "my out" / "manifest.json")["command"]
    assert words == (
        f"anlit prepare OpenWebText --output 'my out' --source hub --tokenizer {tokenizer} --val_fraction 0.2 "
        "--on_bad skip"
    )
    before = hashes(tmp_path / "my out")
    (tmp_path / "my out").rename(tmp_path / "first")
    subprocess.run(f"{sys.executable} -m {words}", shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert hashes(tmp_path / "my out") == before


def slimpajama(folder: Path, texts: list[str]) -> None:
    layouts.slimpajama(folder, {"train": texts[:30], "validation": texts[30:37], "test": texts[37:]})


def fineweb_bin(folder: Path, texts: list[str]) -> None:
    rng = np.random.default_rng(0)
    some = [rng.integers(0, 50256, rng.integers(1, 300)).tolist() for _ in range(60)]
    layouts.fineweb_bin(folder, some, tokens_per_file=3000)


def text_files(folder: Path, texts: list[str]) -> None:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())


def assert_fits(folder: Path, run_dir: Path, vocab_size: int, *arguments: str) -> None:
    """Two steps and a validation; the run's record has the counts of the manifest."""
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    extra = [f"--model.vocab_size={vocab_size}", *arguments, *steps]
    assert run_command(fit_arguments(folder, run_dir, *extra, model="GPT")) == 0
    assert last_checkpoint(run_dir)["global_step"] == 2
    record, manifest = json.loads((run_dir / "run.json").read_text()), read_json(folder / "manifest.json")
    for key in ("documents", "bytes", "tokens", "train", "val", "content_sha256"):
        assert record["data"][key] == manifest[key]
    assert float(logged(run_dir, "val/loss")[-1][1]) > 0
    assert bool(logged(run_dir, "val/bits_per_byte")) == (manifest["bytes"] is not None)


@pytest.mark.parametrize(
    ("corpus", "write", "options"),
    [
        ("SlimPajama", slimpajama, []),
        ("OpenWebText", layouts.openwebtext, ["--val_fraction", "0.2"]),
        ("FineWeb", layouts.fineweb, ["--val_tokens", "500"]),
        ("FineWebBin", fineweb_bin, []),
    ],
)
def test_from_the_hub_s_files_to_training(
    corpus: str, write: Write, options: list[str], texts: list[str], tokenizer: str, tmp_path: Path
) -> None:
    """By each corpus's shipped configuration."""
    write(tmp_path / "hub", texts)
    folder, of_tokens = tmp_path / "out", corpus == "FineWebBin"
    given = ["--source", str(tmp_path / "hub"), "--output", str(folder), "--tokenizer"]
    assert main(["prepare", corpus, *given, "none" if of_tokens else tokenizer, *options]) == 0
    manifest = read_json(folder / "manifest.json")
    if of_tokens:
        files = [np.frombuffer(file.read_bytes(), "<u2")[512:] for file in (tmp_path / "hub").iterdir()]
        assert manifest["tokens"] == sum(map(len, files))
    else:
        assert manifest["tokens"] == len(plain_tokenizer(tokenizer).tokens(texts))
        assert manifest["bytes"] == sum(len(text.encode()) for text in texts)
        assert manifest["documents"] == len(texts)
    config = {"FineWebBin": "fineweb_bin"}.get(corpus, corpus.lower())
    own = [f"--config={SHIPPED / config}.yaml", f"--data.path={folder}", "--data.batch_size=4", "--data.num_workers=0"]
    assert_fits(folder, tmp_path / "run", 50257 if of_tokens else 800, *own)


def test_from_text_files_to_training(texts: list[str], tmp_path: Path) -> None:
    text_files(tmp_path / "text", texts)
    folder = tmp_path / "out"
    arguments = ["--data=TextFiles", f"--data.source={tmp_path / 'text'}", f"--data.path={folder}"]
    assert_fits(folder, tmp_path / "run", 300, *arguments, "--data.vocab_size=300", "--data.val_fraction=0.2")
    assert sorted(read_texts(folder, "train") + read_texts(folder, "val")) == sorted(texts)


def test_text_files_prepared_by_the_command_are_those_of_the_data_module(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_files(tmp_path / "text", texts)
    own = ["--source", str(tmp_path / "text"), "--output", str(tmp_path / "out"), "--val_fraction", "0.2"]
    assert main(["prepare", "TextFiles", *own, "--vocab_size", "300"]) == 0
    monkeypatch.setattr(executors, "encode_task", None)  # nothing is made again
    corpora.TextFiles(str(tmp_path / "text"), str(tmp_path / "out"), vocab_size=300, val_fraction=0.2).prepare_data()


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

    monkeypatch.setitem(CORPORA, "FineWeb", (remember, frozenset()))
    assert main(["prepare", "FineWeb"]) == 1
    assert given == [Options()]
