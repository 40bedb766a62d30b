"""A prepared folder of random tokens and a run on it, made once. No test changes them."""

from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from anlit import GPT
from anlit.evaluation import runner
from tests.data.conftest import prepared, session_folder, streams, tiny_shards  # noqa: F401  fixtures
from tests.evaluation.saved import make_run, make_run_with_text, prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "gpt-1", data, GPT)


@pytest.fixture(scope="session")
def run_with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on data with a tokenizer."""
    return make_run_with_text(tmp_path_factory.mktemp("text"), GPT)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports write no pictures, which take seconds."""
    monkeypatch.setattr(runner, "save", lambda figure, path: plt.close(figure))
