"""`anlit prepare` as users meet it, and each corpus from its files in the hub's layout to the first training steps."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import anlit
from anlit.cli import main
from anlit.data import corpora
from anlit.data.preparation import executors
from anlit.data.preparation.recipes import CORPORA, Options
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents, write
from tests.data.preparing import encoded, hashes, read_json, read_texts, scratch, train_tokenizer
from tests.integration.conftest import fit_arguments, last_checkpoint, logged
from tests.integration.conftest import run as run_command

SHIPPED = Path(__file__).parents[2] / "configs" / "data"
TEXTS = [text for text in documents(50, seed=11) if len(text) < 10_000]
ADDED = ("--output", "--source", "--on_bad", "--cluster", "--repo", "--workers", "--verify", "--tokenizer")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@pytest.fixture
def command(tmp_path: Path, tokenizer: str, monkeypatch) -> list[str]:
    """To prepare the folder `my out` from `hub`, from the folder that has both."""
    layouts.openwebtext(tmp_path / "hub", TEXTS)
    monkeypatch.chdir(tmp_path)
    own = ["--source", "hub", "--output", "my out", "--tokenizer", tokenizer, "--val_fraction", "0.2"]
    return ["prepare", "OpenWebText", *own, "--workers", "1"]


def test_help_lists_corpora_and_options(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in (*CORPORA, *ADDED) if name not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "anlit prepare needs corpus: anlit prepare --help lists the options"),
        ("FineWeb --workers 2 --cluster tcp://a:1", "--workers counts processes of this machine, and --cluster has"),
        ("Hub --repo allenai/c4", "Hub needs --repo and --files, such as --repo allenai/c4 --files"),
        ("Hub --repo ../c4 --files *", "--repo ../c4 is no dataset of the hub: give owner/name, such as allenai/c4."),
        ("FineWeb --workers 0", "--workers 0 must be at least 1"),
        ("FineWeb --val_tokens 0", "--val_tokens must be at least 1, not 0"),
        ("TextFiles", "TextFiles needs --source, the folder that holds the texts."),
        ("TextFiles --source . --val_fraction 1", "val_fraction must be between 0 and 1, not 1.0"),
        ("TextFiles --source . --pattern /etc/*.txt", 'The pattern "/etc/*.txt" is not one for files under'),
        ("TextFiles --source . --pattern a/../../*.txt", 'The pattern "a/../../*.txt" is not one for files under'),
        ("SlimPajama --source nowhere", "There is no folder nowhere: set --source"),
        ("SlimPajama --source . --tokenizer gpt3", "There is no tokenizer at gpt3"),
        ("SlimPajama --source . --max_document_bytes 0", "--max_document_bytes must be at least 1, not 0"),
        ("FineWebBin --source . --tokenizer bpe", "--tokenizer bpe is for text"),
    ],
)
def test_a_wrong_command_is_one_sentence(arguments: str, says: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """tests/integration/mistakes.py has more."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("anlit: error: ")
    assert says in line
    assert hashes(tmp_path) == {}


def test_what_is_said_and_what_is_verified(command: list[str], tmp_path: Path, capsys) -> None:
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
    assert f"{chunk.name} is damaged (its CRC-32" in capsys.readouterr().err
    assert hashes(out) == before


def test_the_command_in_the_manifest_makes_the_same_folder(command: list[str], tokenizer: str, tmp_path: Path) -> None:
    assert main([*command, "--on_bad", "skip"]) == 0
    words = read_json(tmp_path / "my out" / "manifest.json")["command"]
    own = f"--output 'my out' --source hub --tokenizer {tokenizer} --val_fraction 0.2 --on_bad skip"
    assert words == f"anlit prepare OpenWebText {own}"
    before = hashes(tmp_path / "my out")
    (tmp_path / "my out").rename(tmp_path / "first")
    subprocess.run(f"{sys.executable} -m {words}", shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert hashes(tmp_path / "my out") == before


WRITE: dict[str, Callable[[Path], object]] = {
    "SlimPajama": lambda hub: layouts.slimpajama(
        hub, {"train": TEXTS[:30], "validation": TEXTS[30:37], "test": TEXTS[37:]}
    ),
    "OpenWebText": lambda hub: layouts.openwebtext(hub, TEXTS),
    "FineWeb": lambda hub: layouts.fineweb(hub, TEXTS),
    "FineWebBin": lambda hub: layouts.fineweb_bin(
        hub, [list(range(number, 3 * number)) for number in range(1, 100)], tokens_per_file=3000
    ),
}


@pytest.mark.parametrize(
    ("corpus", "config", "options"),
    [
        ("SlimPajama", "slimpajama", []),
        ("OpenWebText", "openwebtext", ["--val_fraction", "0.2"]),
        ("FineWeb", "fineweb", ["--val_tokens", "500"]),
        ("FineWebBin", "fineweb_bin", ["--tokenizer", "none"]),
    ],
)
def test_from_the_hub_s_files_to_training(
    corpus: str, config: str, options: list[str], tokenizer: str, tmp_path: Path
) -> None:
    """By each corpus's shipped configuration: its DataModule makes batches, and two of them are trained on."""
    WRITE[corpus](tmp_path / "hub")
    folder, of_tokens = tmp_path / "out", corpus == "FineWebBin"
    given = ["--source", str(tmp_path / "hub"), "--output", str(folder)]
    assert main(["prepare", corpus, *given, *(options if of_tokens else ["--tokenizer", tokenizer, *options])]) == 0
    manifest = read_json(folder / "manifest.json")
    if not of_tokens:
        size = sum(len(text.encode()) for text in TEXTS)
        expected = (len(TEXTS), size, len(encoded(tokenizer, TEXTS)))
        assert (manifest["documents"], manifest["bytes"], manifest["tokens"]) == expected
    settings = yaml.safe_load((SHIPPED / f"{config}.yaml").read_text())["data"]
    own = {"path": str(folder), "batch_size": 4, "num_workers": 0, "context_length": 32}
    data = getattr(anlit, settings["class_path"].removeprefix("anlit."))(**settings["init_args"] | own)
    data.prepare_data()
    data.setup()
    assert next(iter(data.train_dataloader())).tokens.shape == (4, 32)
    if corpus in ("SlimPajama", "FineWebBin"):
        given = [f"--config={SHIPPED / config}.yaml", f"--data.path={folder}", "--data.num_workers=0"]
        assert_fits(folder, tmp_path / "run", manifest["vocab_size"], *given)


def assert_fits(folder: Path, run_dir: Path, vocab_size: int, *arguments: str) -> None:
    """Two steps and a validation; the run's record has the counts of the manifest."""
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    extra = [f"--model.vocab_size={vocab_size}", *arguments, "--data.batch_size=4", *steps]
    assert run_command(fit_arguments(folder, run_dir, *extra, model="GPT")) == 0
    assert last_checkpoint(run_dir)["global_step"] == 2
    record, manifest = read_json(run_dir / "run.json")["data"], read_json(folder / "manifest.json")
    kept = ("documents", "bytes", "tokens", "train", "val", "content_sha256")
    assert [record[key] for key in kept] == [manifest[key] for key in kept]
    assert float(logged(run_dir, "val/loss")[-1][1]) > 0
    assert bool(logged(run_dir, "val/bits_per_byte")) == (manifest["bytes"] is not None)


def test_from_text_files_to_training(tmp_path: Path, monkeypatch) -> None:
    """The folder that training prepares is the one that the command would make."""
    source, folder = str(tmp_path / "text"), tmp_path / "out"
    for number, text in enumerate(TEXTS):
        write(tmp_path / "text" / f"{number}.txt", text.encode())
    arguments = ["--data=TextFiles", f"--data.source={source}", f"--data.path={folder}"]
    assert_fits(folder, tmp_path / "run", 300, *arguments, "--data.vocab_size=300", "--data.val_fraction=0.2")
    assert sorted(read_texts(folder, "train") + read_texts(folder, "val")) == sorted(TEXTS)
    monkeypatch.setattr(executors, "encode_task", None)  # nothing is made again
    own = ["--source", source, "--output", str(folder), "--val_fraction", "0.2", "--vocab_size", "300"]
    assert main(["prepare", "TextFiles", *own]) == 0


@pytest.mark.parametrize("corpus", ["SlimPajama", "OpenWebText", "FineWeb", "FineWebBin"])
def test_training_on_what_is_not_prepared(corpus: str, tmp_path: Path) -> None:
    said = f"nowhere with {corpus}: prepare it with `anlit prepare {corpus} --output .*nowhere`, or set --data.path"
    with pytest.raises(UserError, match=said):
        getattr(corpora, corpus)(str(tmp_path / "nowhere")).prepare_data()


def test_options_and_command_agree(monkeypatch) -> None:
    """What the command gives by default is what the data modules and other callers give."""
    given: list[Options] = []

    def remember(options: Options) -> None:
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setitem(CORPORA, "FineWeb", (remember, frozenset()))
    assert main(["prepare", "FineWeb"]) == 1
    assert given == [Options()]
