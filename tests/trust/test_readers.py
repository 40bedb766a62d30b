"""No file is unpickled: the class of faults, not its cases."""

import re
from pathlib import Path

import pytest

import anlit

FILES = sorted(Path(anlit.__file__).parent.rglob("*.py"))
PIPE = "attention/choice/process.py"
"""Reads what its own parent process writes, and no file."""
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


@pytest.mark.parametrize("call", ["pickle.load", "Unpickler", "read_metadata", "FileSystemReader"])
def test_nothing_in_the_package_unpickles(call: str) -> None:
    files = [file for file in FILES if not file.as_posix().endswith(PIPE)]
    assert [str(file) for file in files if call in file.read_text(encoding="utf-8")] == []


def test_torch_load_takes_tensors_and_plain_values_alone() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file
