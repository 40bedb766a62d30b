"""`anlit generate` as its user sees it."""

import io
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anlit import GPT, load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import END_OF_DOCUMENT
from anlit.evaluation.tokenizer import load_tokenizer
from anlit.reporting.text import KEPT, without_control_codes
from tests.checkpoints.foreign import trained
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.hub.conftest import make_run_with_text


def records(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    """What `anlit generate --json` prints."""
    capsys.readouterr()
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_and_the_stream_hold_the_same_text(run: Path, tmp_path: Path, capsys) -> None:
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "café ☕"}\n')
    command = [
        str(run),
        "the cat",
        f"--prompts={prompts}",
        "--samples=2",
        "--max_tokens=30",
        "--seed=3",
    ]
    printed = records(capsys, *command)
    samples = [("the cat", 0), ("the cat", 1), ("café ☕", 0), ("café ☕", 1)]
    assert [(own["prompt"], own["sample"]) for own in printed] == samples
    for own in printed:
        assert len(own["tokens"]) == len(own["log_likelihood"])
        assert own["finish"] in ("length", "end_of_document")
        assert max(own["tokens"]) < VOCABULARY - 10
    assert main(["generate", *command]) == 0
    shown = capsys.readouterr().out
    place = -1
    for number, own in enumerate(printed):
        header = f"--- prompt {number // 2 + 1}, sample {number % 2 + 1}\n{own['prompt']}"
        whole = own["text"].rstrip("�")  # bytes of an unfinished character are not shown
        place = shown.index(without_control_codes(header + whole, KEPT), place + 1)


def test_the_space_before_a_continuation_is_kept(tmp_path: Path, capsys) -> None:
    """As Llama's tokenizer has it: a text that is decoded alone loses its first space."""
    words = Tokenizer(
        models.WordLevel(
            {END_OF_DOCUMENT: END, **{f"▁{word}": 1 + n for n, word in enumerate("abcd")}}
        )
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    run = make_run_with_text(tmp_path, GPT, words)
    (own,) = records(capsys, run, "a b", "--max_tokens=5")
    assert own["text"] == "".join(f" {'abcd'[token - 1]}" for token in own["tokens"]) != ""
    assert main(["generate", str(run), "a b", "--max_tokens=5"]) == 0
    assert capsys.readouterr().out == f"a b{own['text']}\n"
    assert main(["generate", str(run), "a b", "--max_tokens=5", "--samples=2"]) == 0
    assert f"sample 1\na b{own['text']}\n" in capsys.readouterr().out


def test_one_prompt_is_shown_without_a_header(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog"))
    assert main(["generate", str(run), "--temperature", "0", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the dog")


def test_a_prompt_may_follow_an_option(run: Path, capsys) -> None:
    given = ["the cat", "the dog"]
    before = records(capsys, run, *given, "--max_tokens=3", "--device", "cpu")
    assert records(capsys, run, given[0], "--max_tokens=3", "--device", "cpu", given[1]) == before
    assert records(capsys, run, "--max_tokens=3", "--device", "cpu", *given) == before


def test_runs_and_exports_bring_tokenizer_and_separator_wherever_they_go(
    tmp_path: Path, capsys, refusal
):
    run, out = trained(tmp_path, "GPT", document_token_at="start"), tmp_path / "out"
    given = ["the cat", "--max_tokens", "8", "--device", "cpu"]
    before = records(capsys, run, *given)
    assert before[0]["prompt_tokens"][0] == END
    assert main(["export", str(run), "--output", str(out)]) == 0
    shutil.rmtree(tmp_path / "data")
    moved = Path(shutil.move(run, tmp_path / "moved"))
    for place in (moved, out, moved / "checkpoints" / "best.ckpt"):
        assert records(capsys, place, *given) == before
    (moved / "tokenizer.json").write_text((moved / "tokenizer.json").read_text() + " ")
    assert "was trained with another tokenizer" in refusal("generate", moved, *given)


@pytest.mark.parametrize(("settings", "begins"), [({}, False), ({"document_masking": False}, True)])
def test_a_separator_before_the_prompt_where_the_model_saw_one(
    settings: dict, begins: bool, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(str(make_run_with_text(tmp_path, GPT, **settings)), "cpu")
    text = load_tokenizer(checkpoint)
    assert (
        text.encode_prompt("the cat", checkpoint)
        == [END] * begins + text.tokenizer.encode("the cat").ids
    )


def test_a_model_without_a_tokenizer_asks_for_one(tmp_path: Path, refusal) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), GPT)
    said = refusal("generate", run, "text")
    assert f"has no tokenizer (looked in {run}, {tmp_path}/data): set --tokenizer" in said


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["a\udce9b"], "prompt 1 is not UTF-8: convert it"),
    (["the", "--top_p", "0"], "--top_p 0 must be a probability"),
    (["the", "--temperature", "nan"], "--temperature nan must be 0"),
    (["the", "--prompts", "nowhere.txt"], "nowhere.txt is no file: give a file of text"),
    (["the", "--tokenizer", __file__], "test_generate_command.py is not a tokenizer.json"),
])  # fmt: skip
def test_mistakes_are_one_sentence(run: Path, arguments, sentence, refusal) -> None:
    assert sentence in refusal("generate", run, *arguments)
