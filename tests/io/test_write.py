"""Files are replaced in one step, and numbers survive as JSON."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.io.write import jsonable, output_folder, replacing, write_json, write_text, writing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_text(file, "old")
    with suppress(InterruptedError), replacing(file) as partial:
        partial.write_text("half")
        assert file.read_text() == "old"
        raise InterruptedError
    assert ([path.name for path in tmp_path.iterdir()], file.read_text()) == (["a.json"], "old")
    write_text(file, "new")
    assert file.read_text() == "new"


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(
        file,
        {1: [float("nan"), float("inf"), 2.5, True, None], "path": Path("b"), "name": "é\udc80"},
    )
    assert json.loads(file.read_text()) == {
        "1": [None, None, 2.5, True, None],
        "path": "b",
        "name": "é\udc80",
    }
    assert jsonable({256: [float("nan"), 0.123456789, 3, True]}, digits=7) == {
        "256": [None, 0.1234568, 3, True]
    }


def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output .*file/sub cannot be made \(Not a directory\)"):
        output_folder(str(tmp_path / "file" / "sub"))
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(UserError, match=r"--output .* cannot be written \(Is a directory\)"),
        writing(tmp_path),
    ):
        write_text(tmp_path / "folder", "")
