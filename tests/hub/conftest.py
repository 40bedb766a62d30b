"""A small run folder whose data have a tokenizer, and a place for the code that transformers copies."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from anlit import GPT
from anlit.data.preparation.sources import file_sha256
from anlit.data.tokenizer import train_bpe
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run, prepare

TEXTS = [
    "the cat sat on the mat and the dog sat by the cat",
    "naïve café – ☕ for the cats and the dogs",
] * 3


def make_run_with_text(
    folder: Path, architecture, tokenizer: Tokenizer | None = None, **changes
) -> Path:
    """A run in FOLDER/run on data in FOLDER/data; its own tokenizer has a few tokens less than the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or train_bpe(TEXTS, VOCABULARY - 10)).save(str(folder / "tokenizer.json"))
    data = prepare(folder / "data", tokenizer_sha256=file_sha256(folder / "tokenizer.json"))
    (folder / "tokenizer.json").rename(data / "tokenizer.json")
    return make_run(folder / "run", data, architecture, **changes)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_with_text(tmp_path_factory.mktemp("text"), GPT)


@pytest.fixture(scope="session")
def own_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where transformers copies a folder's code to, for this session alone."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules"))
        )
        yield
