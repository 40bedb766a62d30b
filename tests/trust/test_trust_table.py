"""What foreign files, kills and mistakes come to: one table of sentence, exit code and state of the files.

    TRUST_TABLE=docs/results/trust.md python -m pytest -m slow tests/trust -s -q

prints the table, and writes it to the file that the variable names.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from anlit.reporting.table import markdown_table
from tests.checkpoints.foreign import trained
from tests.integration.conftest import shards
from tests.trust import data, models, pages, training
from tests.trust.place import Case, Place, sentence

__all__ = ["shards"]
CASES = sorted(
    [*models.CASES, *data.CASES, *training.CASES, *pages.CASES],
    key=lambda case: (not case.letter.isalpha(), case.letter),
)
HEAD = ["", "what the user does", "exit code", "sentence", "files afterwards"]
PAGE = """# What foreign files, kills and mistakes come to

[What is safe to open](../safety.md) gives the rules; this table has a row for each case that was tried. Exit code 2 is
a refusal, 1 a run that failed, 0 success. "nothing foreign ran" means that the command or pickle which the file named
left no trace. A test asserts every cell but the words around the sentence's pattern:

```bash
TRUST_TABLE=docs/results/trust.md python -m pytest -m slow tests/trust -q
```

A to D are files of others, E to M runs that are killed, continued, damaged or watched, N the rest; 1 to 8 are about
preparing data. Paths are shortened to the file's name.
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    trained(folder, "AnGPT")
    (folder / "shards").symlink_to(shards)
    return folder


@pytest.fixture(scope="module")
def rows() -> Iterator[list[list[str]]]:
    """Those of the cases that have run; printed at the end."""
    found: list[list[str]] = []
    yield found
    table = markdown_table(HEAD, found, range(len(HEAD)))
    print(f"\n{table}")
    if file := os.environ.get("TRUST_TABLE"):
        Path(file).write_text(f"{PAGE}\n{table}\n")


def test_every_letter_has_a_row() -> None:
    assert set("ABCDEFGHIJKLMN") | set("12345678") == set(Counter(case.letter for case in CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.letter}: {case.does}")
def test_case(case: Case, base: Path, tmp_path: Path, rows: list[list[str]]) -> None:
    place = Place(tmp_path / "case", base)
    outcome = case.act(place)
    found = sentence(outcome.said, case.says) if case.says else ""
    assert (outcome.code, outcome.state, found is not None) == (case.code, case.state, True), outcome.said
    assert "Traceback" not in outcome.said
    rows.append([case.letter, case.does, outcome.code, f"`{found}`" if found else "", outcome.state])
    shutil.rmtree(place.folder)
