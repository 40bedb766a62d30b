"""All numbers of `lengths`, `needle`, `diagnose` and `diagnose --gaussian` on tiny checkpoints, against stored ones.

To 1e-12 where the processor and the build of torch are those of the record, elsewhere to 1e-3. Only where an issue
says that numbers change may they be written anew:

    python -m tests.golden.test_evaluations
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from anlit import GPT, AnGPT, TextFiles
from anlit.evaluation.diagnose import Diagnose
from anlit.evaluation.gaussian import Gaussian
from anlit.evaluation.lengths import Lengths
from anlit.evaluation.needle import Needle
from anlit.evaluation.settings import DiagnoseSettings, LengthsSettings, NeedleSettings
from anlit.reporting.files import jsonable
from tests.data.conftest import write_corpus
from tests.evaluation.saved import make_run, prepare
from tests.golden.test_losses import machine

RECORD = Path(__file__).with_name("evaluations.json")
EVALUATIONS = {
    "lengths": Lengths(LengthsSettings((16, 64), device="cpu", tokens=512)),
    "needle": Needle(NeedleSettings((128, 256), device="cpu", n_depths=3, n_samples=2, seed=3)),
    "diagnose": Diagnose(DiagnoseSettings((16, 64), device="cpu", tokens=256)),
    "gaussian": Gaussian(["Plain", "LogN", "SqrtLogN", "ScaleInvariant"], (20, 200), draws=5, seed=1),
}
NUMBERS = ("tokens", "depths", "arms", "measurements", "copying", "lengths", "mechanisms")
"""The parts of a record that were measured."""


def runs(folder: Path, data: Path, **size: Any) -> list[str]:
    """Two seeds of GPT+ and one anGPT."""
    kinds = {"gpt-1": (GPT, 1), "gpt-2": (GPT, 2), "angpt": (AnGPT, 1)}
    return [str(make_run(folder / name, data, kind, seed, **size)) for name, (kind, seed) in kinds.items()]


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """The numbers of each evaluation, as they are in its file."""
    write_corpus(folder / "text")
    text = TextFiles(str(folder / "text"), str(folder / "shards"), vocab_size=320, val_fraction=0.3)
    text.prepare_data()
    checkpoints = {
        "lengths": runs(folder / "lengths", prepare(folder / "data")),
        "needle": runs(folder / "needle", folder / "shards", context_length=128),
        "diagnose": [str(make_run(folder / "angpt", folder / "data", AnGPT, n_layers=2))],
        "gaussian": [],
    }
    records = {name: jsonable(own.measured(checkpoints[name]), own.digits) for name, own in EVALUATIONS.items()}
    return {name: {part: record[part] for part in NUMBERS if part in record} for name, record in records.items()}


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("evaluations"))


@pytest.mark.parametrize("command", EVALUATIONS)
def test_numbers_are_the_stored_ones(command: str, now: dict[str, Any]) -> None:
    record = json.loads(RECORD.read_text())
    tolerance = 1e-12 if record["machine"] == machine() else 1e-3
    stored, again = ({keystr(place): leaf for place, leaf in tree_flatten_with_path(each[command])[0]}
                     for each in (record["numbers"], now))  # fmt: skip
    assert stored.keys() == again.keys()
    for place, value in stored.items():
        right = value
        if isinstance(value, float):
            right = pytest.approx(value, rel=tolerance, abs=tolerance if tolerance > 1e-6 else 0)
        assert again[place] == right, place


def write() -> None:
    """Store this machine's numbers."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        record = {"machine": machine(), "numbers": measured(Path(folder))}
    RECORD.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write()
