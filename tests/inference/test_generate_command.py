"""`anlit generate` as its user sees it."""

import io
import json
import shutil
from pathlib import Path

import pytest

from anlit import GPT
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.inference.text import text_of
from anlit.reporting.text import KEPT, without_control_codes
from tests.checkpoints.foreign import trained
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.inference.with_text import make_run_with_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_with_text(tmp_path_factory.mktemp("text"), GPT)


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_and_the_stream_hold_the_same_text(run: Path, capsys) -> None:
    command = ["generate", str(run), "the cat", "café ☕", "--samples", "2", "--max_tokens", "30", "--seed", "3"]
    assert main([*command, "--json"]) == 0
    records = lines(capsys)
    assert [(one["prompt"], one["sample"]) for one in records] == [
        ("the cat", 0), ("the cat", 1), ("café ☕", 0), ("café ☕", 1)
    ]  # fmt: skip
    for one in records:
        assert len(one["tokens"]) == len(one["log_likelihood"])
        assert one["finish"] in ("length", "end_of_document")
        assert max(one["tokens"]) < VOCABULARY - 10
    assert main(command) == 0
    shown = capsys.readouterr().out
    place = -1
    for number, one in enumerate(records):
        header = f"--- prompt {number // 2 + 1}, sample {number % 2 + 1}\n{one['prompt']}"
        whole = one["text"].rstrip("�")  # bytes of an unfinished character are not shown
        place = shown.index(without_control_codes(header + whole, KEPT), place + 1)


def test_one_prompt_is_shown_without_a_header(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog"))
    assert main(["generate", str(run), "--temperature", "0", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the dog")


def test_prompts_from_files(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "one.txt").write_text("the cat\nsat")
    (tmp_path / "many.jsonl").write_text('{"prompt": "the dog"}\n\n{"prompt": "a cat"}\n')
    common = ["--max_tokens", "3", "--json"]
    assert main(["generate", str(run), "--prompts", str(tmp_path / "one.txt"), *common]) == 0
    assert lines(capsys)[0]["prompt"] == "the cat\nsat"
    assert main(["generate", str(run), "--prompts", str(tmp_path / "many.jsonl"), *common]) == 0
    first, second = lines(capsys)
    assert (first["prompt"], second["prompt"]) == ("the dog", "a cat")


def test_an_exported_folder_brings_its_tokenizer(run: Path, tmp_path: Path, capsys) -> None:
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    for place in (str(run), str(tmp_path / "out"), str(run / "checkpoints" / "best.ckpt")):
        assert main(["generate", place, "the", "--json", "--max_tokens", "8"]) == 0
    first, *others = lines(capsys)
    assert all(one == first for one in others)


@pytest.mark.parametrize("token_at", ["start", "end"])
def test_a_run_that_was_moved_away_from_its_data_has_its_tokenizer(token_at: str, tmp_path: Path, capsys) -> None:
    run = trained(tmp_path, "GPT", document_token_at=token_at)
    given = ["the cat", "--max_tokens", "8", "--device", "cpu", "--json"]
    assert main(["generate", str(run), *given]) == 0
    (before,) = lines(capsys)
    shutil.rmtree(tmp_path / "data")
    moved = shutil.move(run, tmp_path / "moved")
    assert main(["generate", str(moved), *given]) == 0
    assert lines(capsys) == [before]
    assert (before["prompt_tokens"][0] == END) == (token_at == "start")
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + " ")
    assert main(["generate", str(moved), *given]) == 2
    assert "was trained with another tokenizer" in capsys.readouterr().err


def test_a_separator_before_the_prompt_where_the_model_saw_one(tmp_path: Path) -> None:
    for name, settings, begins in (
        ("end", {}, False),
        ("start", {"token_at": "start"}, True),
        ("unmasked", {"document_masking": False}, True),
    ):
        checkpoint = load_checkpoint(str(make_run_with_text(tmp_path / name, GPT, **settings)), "cpu")
        text = text_of(checkpoint)
        assert text.prompt("the cat", checkpoint) == [END] * begins + text.encode("the cat")


def test_a_model_without_a_tokenizer_asks_for_one(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), GPT)
    assert main(["generate", str(run), "text"]) == 2
    assert f"has no tokenizer (looked in {run}): set --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([""], "prompt 1 of 1 is empty: give at least one token"),
        (["the", "", "cat"], "prompt 2 of 3 is empty"),
        (["the", "--max_tokens", "0"], "must be at least 1"),
        (["the", "--top_p", "2"], "--top_p 2 must be a probability"),
        (["the", "--prompts", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["the", "--prompts", "bad.jsonl"], 'bad.jsonl, line 2 is no prompt: write {"prompt": "text"}'),
        (["the", "--tokenizer", "other.json"], "was trained with another tokenizer"),
        (["the", "--tokenizer", "bad.jsonl"], "is not a tokenizer.json"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, arguments, sentence, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{"text": "no"}\n')
    other = json.loads((run.parent / "data" / "tokenizer.json").read_text())
    Path("other.json").write_text(json.dumps(other, indent=1))
    assert main(["generate", str(run), *arguments]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1
