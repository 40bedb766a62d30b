"""`anlit generate` as its user sees it."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anlit import GPT, load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import END_OF_DOCUMENT
from anlit.evaluation.tokenizer import load_checkpoint_tokenizer
from anlit.reporting.text import PLAIN_CONTROLS, without_control_codes
from tests.checkpoints.foreign import trained
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, make_run_with_text, prepare

Capture = pytest.CaptureFixture[str]


def generate_records(capsys: Capture, *arguments: object) -> list[dict[str, Any]]:
    """The records that `anlit generate --json` prints."""
    capsys.readouterr()
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return list(map(json.loads, lines))


def with_tolerance(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records to compare with. Log-likelihoods may differ by rounding.

    On some processors a product's last digits depend on where in memory its factors lie.
    """
    return [
        {**record, "log_likelihood": pytest.approx(record["log_likelihood"], abs=1e-5)}
        for record in records
    ]


def test_json_lines_and_the_printed_text_are_the_same(
    run_with_text: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompts_file = tmp_path / "prompts.jsonl"
    prompts_file.write_text('{"prompt": "café ☕"}\n')
    settings = ["--samples=2", "--max_tokens=30", "--seed=3"]
    command = [str(run_with_text), "the cat", f"--prompts={prompts_file}", *settings]

    records = generate_records(capsys, *command)
    assert main(["generate", *command]) == 0
    printed = capsys.readouterr().out

    prompts = [record["prompt"] for record in records]
    samples = [record["sample"] for record in records]
    assert prompts == ["the cat", "the cat", "café ☕", "café ☕"]
    assert samples == [0, 1, 0, 1]
    headers = [
        "--- prompt 1, sample 1",
        "--- prompt 1, sample 2",
        "--- prompt 2, sample 1",
        "--- prompt 2, sample 2",
    ]
    position = -1
    for header, record in zip(headers, records, strict=True):
        assert len(record["tokens"]) == len(record["log_likelihood"])
        assert record["finish"] in ("length", "end_of_document")
        assert max(record["tokens"]) < VOCABULARY - 10, "tokens above have no text"
        text = record["text"].rstrip("�")  # bytes of an unfinished character are not printed
        block = f"{header}\n{record['prompt']}{text}"
        expected = without_control_codes(block, PLAIN_CONTROLS)
        position = printed.index(expected, position + 1)


def test_the_space_before_a_continuation_is_kept(tmp_path: Path, capsys: Capture) -> None:
    """As in Llama's tokenizer: a text that is decoded alone loses its first space."""
    vocabulary = {END_OF_DOCUMENT: END, "▁a": 1, "▁b": 2, "▁c": 3, "▁d": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    run = make_run_with_text(tmp_path, GPT, tokenizer)
    arguments = [str(run), "a b", "--max_tokens=5"]

    (record,) = generate_records(capsys, *arguments)
    assert main(["generate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert main(["generate", *arguments, "--samples=2"]) == 0
    printed_samples = capsys.readouterr().out

    words = ["", " a", " b", " c", " d"]
    expected = "".join(words[token] for token in record["tokens"])
    assert expected
    assert record["text"] == expected
    assert printed == f"a b{record['text']}\n"
    assert f"sample 1\na b{record['text']}\n" in printed_samples


def test_a_single_prompt_is_printed_without_a_header(
    run_with_text: Path, capsys: Capture, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog"))

    assert main(["generate", str(run_with_text), "--temperature=0", "--max_tokens=5"]) == 0

    assert capsys.readouterr().out.startswith("the dog")


def test_a_prompt_may_follow_an_option(run_with_text: Path, capsys: Capture) -> None:
    options = ["--max_tokens=3", "--device", "cpu"]

    expected = with_tolerance(
        generate_records(capsys, run_with_text, "the cat", "the dog", *options)
    )
    between = generate_records(capsys, run_with_text, "the cat", *options, "the dog")
    at_the_end = generate_records(capsys, run_with_text, *options, "the cat", "the dog")

    assert between == expected
    assert at_the_end == expected


def test_moved_runs_and_exports_keep_tokenizer_and_separator(
    tmp_path: Path, capsys: Capture, refusal
) -> None:
    run = trained(tmp_path, "GPT", document_token_at="start")
    exported = tmp_path / "out"
    command = ["the cat", "--max_tokens", "8", "--device", "cpu"]
    expected = generate_records(capsys, run, *command)
    assert expected[0]["prompt_tokens"][0] == END

    assert main(["export", str(run), "--output", str(exported)]) == 0
    shutil.rmtree(tmp_path / "data")
    moved = Path(shutil.move(run, tmp_path / "moved"))

    for checkpoint in (moved, exported, moved / "checkpoints" / "best.ckpt"):
        assert generate_records(capsys, checkpoint, *command) == with_tolerance(expected)
    tokenizer = moved / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert "was trained with another tokenizer" in refusal("generate", moved, *command)


@pytest.mark.parametrize("has_masking", [True, False])
def test_a_separator_comes_before_the_prompt_if_the_model_saw_it(
    has_masking: bool, tmp_path: Path
) -> None:
    run = make_run_with_text(tmp_path, GPT, document_masking=has_masking)
    checkpoint = load_checkpoint(str(run), "cpu")
    tokenizer = load_checkpoint_tokenizer(checkpoint)

    tokens = tokenizer.encode_prompt("the cat")

    text_tokens = tokenizer.tokenizer.encode("the cat").ids
    separator = [] if has_masking else [END]
    assert tokens == separator + text_tokens


def test_a_model_without_a_tokenizer_asks_for_one(tmp_path: Path, refusal) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), GPT)

    message = refusal("generate", run, "text")

    assert f"has no tokenizer (looked in {run}, {tmp_path}/data): set --tokenizer" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a\udce9b"], "prompt 1 is not UTF-8: convert it"),
        (["the", "--top_p", "0"], "top_p 0 must be a probability"),
        (["the", "--temperature", "nan"], "temperature nan must be 0"),
        (["the", "--prompts", "nowhere.txt"], "nowhere.txt is not a file: give a file of text"),
        (["the", "--tokenizer", __file__], "test_generate_command.py is not a tokenizer.json"),
    ],
)
def test_mistakes_are_a_single_sentence(
    run_with_text: Path, arguments: list[str], message: str, refusal
) -> None:
    assert message in refusal("generate", run_with_text, *arguments)


def test_standard_input_that_is_not_utf8_is_a_single_sentence(
    run_with_text: Path, refusal, monkeypatch
) -> None:
    latin1 = io.TextIOWrapper(io.BytesIO(b"a\xe9b"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", latin1)

    assert "standard input is not UTF-8" in refusal("generate", run_with_text)
