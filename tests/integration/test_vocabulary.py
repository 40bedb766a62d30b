"""A model whose configuration gives no vocab_size takes that of its data."""

from pathlib import Path

import pytest
import yaml

import anlit
from anlit.cli import main
from anlit.errors import UserError
from tests.integration.conftest import last_checkpoint

SMALL = ["--model.context_length=32", "--model.n_layers=1", "--model.n_heads=2", "--model.d_model=16"]
TRAINER = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch) -> list[str]:
    """The options of a corpus that is not prepared yet."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(" ".join(f"word{number * 7 + k}" for k in range(60)))
    return ["--data=TextFiles", "--data.source=texts", "--data.path=shards", "--data.vocab_size=300"]


def test_model_takes_the_vocabulary_of_its_data(texts: list[str]) -> None:
    assert main(["fit", "--model=AnGPT", *SMALL, *TRAINER, *texts, "--run_dir=run"]) == 0
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    checkpoint = last_checkpoint(Path("run"))
    assert saved["model"]["init_args"]["vocab_size"] == 384  # 300 rounded up to a multiple of 128
    assert checkpoint["hyper_parameters"]["vocab_size"] == 384
    assert checkpoint["state_dict"]["model.embedding.weight"].shape == (384, 16)


def test_model_without_a_vocabulary_is_refused_in_python() -> None:
    with pytest.raises(UserError, match="vocab_size is not given"):
        anlit.GPT(d_model=16, n_heads=2)


def test_size_expects_the_vocabulary_of_data_that_do_not_exist_yet(texts: list[str]) -> None:
    for extra, vocabulary in ((texts, 384), (["--data=FineWeb"], 50_304)):
        counts = []
        for given in ([], [f"--model.vocab_size={vocabulary}"]):
            assert main(["size", "--model=GPT", *SMALL, *extra, *given, "--json", "size.json"]) == 0
            counts.append(yaml.safe_load(Path("size.json").read_text())["parameters"])
        assert counts[0] == counts[1]
