"""A user whose class fails reads which line failed and what it said, from a worker process too."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.errors import RUN_FOLDER, report_unforeseen
from tests.integration.test_users_data import MINE, Refusal, fit
from tests.integration.users_data import Mistaken

FILE = Path(__file__).with_name("users_data.py")
SHAPE = "--model.vocab_size=64"


def line_with(code: str) -> str:
    """`FILE:LINE` of the line of users_data.py that contains `code`."""
    for number, line in enumerate(FILE.read_text().splitlines(), 1):
        if code in line:
            return f"{FILE}:{number}"
    raise AssertionError(code)


def error_of_run(capsys: pytest.CaptureFixture[str], arguments: list[str], run: Path) -> str:
    """The only error of a run that fails, which names the file with the traceback."""
    assert main([*arguments, f"--run_dir={run}"]) == 1
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("anlit: error: ")]
    (file,) = run.glob("error-*.txt")
    assert error.endswith(f": correct this line, or report it with {file}, which has the traceback")
    return error


@pytest.mark.parametrize("data", ["FailsInWorker", "TokenData"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_line_and_the_message_of_a_dataset_that_fails(
    data: str, num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = fit(f"{MINE}.FailsInWorker")
    if data == "TokenData":
        arguments = fit("TokenData", f"--data.train={MINE}.Mistaken")

    workers = f"--data.num_workers={num_workers}"
    error = error_of_run(capsys, [*arguments, SHAPE, workers], tmp_path / "run")

    place = line_with('{}["text"]')
    assert f"unforeseen KeyError ('text') at {place}" in error
    assert (f"{place} in DataLoader worker process" in error) == (num_workers > 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_users_line_is_named_if_a_library_that_it_calls_fails(
    num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = ["--data.kind=library", f"--data.num_workers={num_workers}"]

    arguments = fit(f"{MINE}.FailsInWorker", SHAPE, *kind)
    error = error_of_run(capsys, arguments, tmp_path / "run")

    assert "unforeseen RuntimeError (stack expects each tensor to be equal size" in error
    assert f" at {line_with('torch.stack([self.rows[0]')}" in error


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sentence_of_the_users_class_is_printed_alone(
    num_workers: int, tmp_path: Path, refusal: Refusal
) -> None:
    kind = ["--data.kind=UserError", f"--data.num_workers={num_workers}"]

    error = refusal(*fit(f"{MINE}.FailsInWorker", SHAPE, *kind), f"--run_dir={tmp_path / 'run'}")

    assert error == "anlit: error: row 7 is empty: remove it"


def test_the_line_of_a_class_that_fails_in_a_process_pool(tmp_path: Path) -> None:
    RUN_FOLDER.set(str(tmp_path))

    with ProcessPoolExecutor(1) as pool:
        error = pool.submit(Mistaken().__getitem__, 7).exception()

    assert error is not None
    sentence = report_unforeseen(error)
    place = line_with('{}["text"]')
    assert f"unforeseen KeyError ('text') at {place}: correct this" in sentence
