"""Files are replaced whole, and numbers survive as JSON."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.io.write import jsonable, output_folder, replacing, write_json, write_text, writing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_text(file, "old")

    with suppress(InterruptedError), replacing(file) as temporary:
        temporary.write_text("half")
        assert file.read_text() == "old"
        raise InterruptedError

    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert file.read_text() == "old"
    write_text(file, "new")
    assert file.read_text() == "new"


def test_values_that_json_does_not_have_are_null_or_strings(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    numbers = [float("nan"), float("inf"), 2.5, True, None]

    write_json(file, {1: numbers, "path": Path("b"), "name": "é\udc80"})

    expected = {"1": [None, None, 2.5, True, None], "path": "b", "name": "é\udc80"}
    assert json.loads(file.read_text()) == expected


def test_numbers_can_be_rounded_to_significant_digits() -> None:
    value = jsonable({256: [float("nan"), 0.123456789, 3, True]}, digits=7)

    assert value == {"256": [None, 0.1234568, 3, True]}


def test_an_output_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(UserError, match=r"--output .*file/sub cannot be made \(Not a directory\)"):
        output_folder(str(file / "sub"))


def test_an_output_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    message = r"--output .* cannot be written \(Is a directory\)"
    with pytest.raises(UserError, match=message), writing(tmp_path):
        write_text(folder, "")
