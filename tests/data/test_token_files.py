"""Reading `.bin` files of tokens, and refusing those that are none."""

from pathlib import Path

import numpy as np
import pytest

from anlit.data.preparation.formats import read_bin_tokens
from anlit.errors import UserError


def write_tokens(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None):
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    content = b"".join(number.to_bytes(4, "little", signed=True) for number in header)
    path.write_bytes(content + b"".join(token.to_bytes(2, "little") for token in tokens))


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    write_tokens(path, [50256, 1, 65535, 256, 7])
    tokens = read_bin_tokens(path)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [50256, 1, 65535, 256, 7]
    assert [read_bin_tokens(path, part, 2).tolist() for part in (0, 1)] == [[50256, 1], [65535, 256, 7]]
    write_tokens(path, [])
    assert read_bin_tokens(path).tolist() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": 20240521}, r"begins with \[20240521, 1\] instead of \[20240520, 1\]"),
        ({"version": 2}, r"begins with \[20240520, 2\]"),
        ({"count": 4}, "has 1,030 bytes where the 4 tokens of its header make 1,032"),
        ({"count": 2}, "has 1,030 bytes where the 2 tokens of its header make 1,028"),
        ({"count": -1}, "has 1,030 bytes where the -1 tokens"),
    ],
)
def test_wrong_token_files_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    path = tmp_path / "x.bin"
    write_tokens(path, [1, 2, 3], **changes)
    with pytest.raises(UserError, match=rf"x\.bin .*{message}"):
        read_bin_tokens(path)


def test_a_token_file_shorter_than_its_header(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1023))
    with pytest.raises(UserError, match=r"x\.bin is not a file of tokens, it has 1,023 bytes"):
        read_bin_tokens(path)
