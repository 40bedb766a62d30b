"""`anlit score`: the table and the totals."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from anlit import GPT
from anlit.cli import main
from tests.inference.with_text import make_run_with_text

TEXTS = ["the cat sat on the mat by the dog " * 12, "naïve café – ☕ 🐈 for the cats", "x"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_with_text(tmp_path_factory.mktemp("text"), GPT)


def write(folder: Path) -> list[str]:
    (folder / "one.txt").write_text(TEXTS[0], encoding="utf-8")
    with open(folder / "two.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS[1:])
    return [str(folder / "one.txt"), str(folder / "two.jsonl")]


def test_the_table_has_every_token_of_every_text(run: Path, tmp_path: Path, capsys) -> None:
    files, output = write(tmp_path), tmp_path / "scores" / "out.parquet"
    assert main(["score", str(run), *files, "--output", str(output), "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)
    table = pq.read_table(output)
    rows = table.to_pylist()
    for number, text in enumerate(TEXTS):
        own = [row for row in rows if row["document"] == number]
        assert [row["position"] for row in own] == list(range(len(own)))
        assert {row["source"].split(", ")[0] for row in own} == {files[min(number, 1)]}
        content = text.encode()
        assert (own[0]["byte_start"], own[-1]["byte_end"]) == (0, len(content))
        for row in own:
            if "�" not in row["text"]:
                assert content[row["byte_start"] : row["byte_end"]].decode() == row["text"]
        assert any("�" in row["text"] for row in own) == (number == 1)
    assert [totals[key] for key in ("documents", "tokens", "scored")] == [3, len(rows), len(rows)]
    assert totals["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert totals["nats"] == pytest.approx(-sum(row["log_likelihood"] for row in rows))
    assert totals["bits_per_byte"] == pytest.approx(totals["nats"] / math.log(2) / totals["bytes"])
    record = json.loads(table.schema.metadata[b"anlit"])
    assert (record["length"], record["stride"], record["architecture"]) == (16, 8, "GPT")
    assert record["command"].startswith("anlit score ")


def test_settings_are_followed(run: Path, tmp_path: Path, capsys) -> None:
    files = write(tmp_path)
    context = {}
    for stride in (1, 16):
        output = tmp_path / f"{stride}.parquet"
        assert main(["score", str(run), *files, "--output", str(output), "--stride", str(stride)]) == 0
        context[stride] = pq.read_table(output)["n_context"].to_pylist()
    assert "bits per byte" in capsys.readouterr().out
    assert sorted(set(context[16][20:40])) == list(range(1, 17))  # a window's first input is the document's, too
    assert set(context[1][20:40]) == {16}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.txt", "--output", "out.parquet"], "none.txt does not exist: give a file of text"),
        (["empty.txt", "--output", "out.parquet"], "empty.txt, the file: its text is empty"),
        (["bad.jsonl", "--output", "out.parquet"], 'bad.jsonl, line 2: the field "text" is missing'),
        (["fine.txt", "--output", "out.parquet", "--length", "0"], "--length and --batch_size must be at least 1"),
        (["fine.txt", "--output", "fine.txt/out.parquet"], "--output fine.txt/out.parquet cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, arguments, sentence, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fine.txt").write_text("the cat")
    Path("empty.txt").touch()
    Path("bad.jsonl").write_text('{"text": "the"}\n{"prompt": "the"}\n')
    assert main(["score", str(run), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("*.parquet*"))
