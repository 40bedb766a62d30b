"""Documents and source files that cannot be used: one sentence, or left out, counted and listed."""

import json
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import SET_NAMES, documents
from tests.data.preparing import (
    SIZES,
    assert_holds,
    hashes,
    make,
    read_files,
    read_json,
    recipe_of,
    written,
)

FIFTY_MB = 50_000_000


def jsonl_line(text: object, name: str = SET_NAMES[1]) -> bytes:
    return json.dumps({"text": text, "meta": {"redpajama_set_name": name}}).encode() + b"\n"


def write_slimpajama(hub: Path, lines: list[bytes]) -> Path:
    """One validation document and one training file of these lines."""
    for name, content in (("validation/chunk1/a.jsonl", [jsonl_line("val")]), ("train/chunk1/a.jsonl", lines)):
        path = hub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(content))
    return hub / "train/chunk1/a.jsonl"


BAD_LINES = {
    "not_utf8": (b'{"text": "gr\xf6\xdfe"}\n', "is not valid UTF-8"),
    "no_subset_field": (b'{"text": "x", "meta": {}}\n', 'the field "meta.redpajama_set_name" is missing or null'),
    "too_long": (jsonl_line("x" * FIFTY_MB), "has 50,000,000 bytes, more than --max_document_bytes 33554432"),
}
EMPTY = jsonl_line("")


def prepare_command(corpus: str, *options: str) -> int:
    return main(["prepare", corpus, "--source", "../hub", "--output", "out", "--workers", "1", *options])


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are to be compared, and their manifests have the command in them: so it must be the same."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def assert_sentence(printed: str, *parts: str) -> None:
    """The last line is one sentence with these parts, and there is no traceback."""
    *before, last = printed.strip().splitlines()
    assert last.startswith("anlit: error: ")
    assert last.endswith(".")
    for part in parts:
        assert part in last
    assert not [line for line in before if "rror" in line or "Traceback" in line]


@pytest.mark.parametrize("problem", list(BAD_LINES))
def test_a_bad_line_stops_or_is_skipped(
    problem: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, says = BAD_LINES[problem]
    good = [f"document {number}" for number in range(6)]
    lines = [jsonl_line(text) for text in good]
    write_slimpajama(tmp_path / "hub", [*lines[:3], bad, *lines[3:]])
    in_folder(tmp_path / "stopped", monkeypatch)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer) == 2
    assert_sentence(capsys.readouterr().err, "../hub/train/chunk1/a.jsonl, line 4: ", says, "--on_bad skip")
    assert not Path("out/manifest.json").exists()
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer, "--on_bad", "skip") == 0
    assert "7 documents, 1 skipped" in capsys.readouterr().err
    manifest = read_json(Path("out/manifest.json"))
    place = "train/chunk1/a.jsonl, line 4"
    assert manifest["skipped"] == {problem: {"count": 1, "listed": [place]}}
    file = read_files(Path("out"))["train/chunk1/a.jsonl"]
    assert (file["documents"], file["skipped"]) == (6, {problem: 1})
    ((where, reason, detail),) = file["skipped_list"]
    assert (where, reason) == ("line 4", problem)
    assert says in detail
    assert_holds(Path("out"), {"train/RedPajamaC4": good, "val/RedPajamaC4": ["val"]})
    in_folder(tmp_path / "skipped at once", monkeypatch)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer, "--on_bad", "skip") == 0
    assert hashes(tmp_path / "skipped at once" / "out") == hashes(tmp_path / "stopped" / "out")


def test_a_file_that_is_no_parquet(tokenizer: str, tmp_path: Path) -> None:
    files = layouts.openwebtext(tmp_path / "hub", list("abcdef"), n_files=2)
    files[1].write_bytes(b"PAR1 and nothing more")
    recipe = recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2)
    with pytest.raises(UserError, match=r"train-00001-of-00080\.parquet, the file: it has no readable parquet footer"):
        make(tmp_path / "out", recipe)
    manifest = make(tmp_path / "out", recipe, skip_bad=True)
    assert manifest["documents"] == 3
    assert manifest["skipped"]["damaged"]["listed"] == ["plain_text/train-00001-of-00080.parquet, the file"]


def test_only_the_first_thousand_places_are_listed(tokenizer: str, tmp_path: Path) -> None:
    write_slimpajama(tmp_path / "hub", [jsonl_line("good"), *[EMPTY] * 3000])
    sizes = SIZES | {"task_bytes": 1_000_000}
    manifest = make(tmp_path / "out", recipe_of("SlimPajama", tmp_path / "hub", sizes, tokenizer=tokenizer), 1,
                    skip_bad=True)  # fmt: skip
    assert manifest["skipped"]["empty"]["count"] == 3000
    listed = manifest["skipped"]["empty"]["listed"]
    assert len(listed) == 1000
    assert listed[:2] == ["train/chunk1/a.jsonl, line 2", "train/chunk1/a.jsonl, line 3"]
    file = read_files(tmp_path / "out")["train/chunk1/a.jsonl"]
    assert (file["skipped"], len(file["skipped_list"])) == ({"empty": 3000}, 1000)  # of one task


def test_what_was_done_before_a_bad_document_is_kept(tokenizer: str, tmp_path: Path) -> None:
    """The file is cut into parts; its line is counted from the file's beginning."""
    lines = [jsonl_line(text) for text in list(documents(60, seed=3))[10:]]
    write_slimpajama(tmp_path / "hub", [*lines[:30], b"not JSON\n", *lines[30:]])
    recipe = recipe_of("SlimPajama", tmp_path / "hub", SIZES, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"a\.jsonl, line 31: the line is not JSON"):
        make(tmp_path / "out", recipe)
    before = written(tmp_path / "out")
    assert len(before) > 2
    make(tmp_path / "out", recipe, skip_bad=True)
    assert before.items() < written(tmp_path / "out").items()
    make(tmp_path / "at once", recipe, skip_bad=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "at once")
