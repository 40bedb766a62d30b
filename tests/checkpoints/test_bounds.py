"""A small file does not make a large model, and an address in a file is not asked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.storage import remote
from anlit.errors import UserError
from tests.checkpoints.foreign import as_export, as_file, trained


@pytest.fixture(scope="module", params=["NGPT", "AnGPT"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("bounds"), request.param)


@pytest.mark.parametrize("setting", ["n_layers", "vocab_size", "d_model", "d_ff"])
@pytest.mark.parametrize("form", [as_file, as_export])
def test_settings_of_a_larger_model_than_the_weights_are_refused(
    form: Any, setting: str, run: Path, tmp_path: Path
) -> None:
    path = form(run, tmp_path, {setting: 10**9})
    with pytest.raises(UserError, match=f"says that {setting} is 1000000000, but its weights are those of {setting}="):
        load_checkpoint(str(path), "cpu")


def test_weights_that_are_views_of_a_small_tensor_are_refused(run: Path, tmp_path: Path) -> None:
    path = as_file(run, tmp_path, {"vocab_size": 10**9, "d_model": 10**6})
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.embedding.weight"] = torch.zeros(1).expand(10**9, 10**6)
    torch.save(content, path)
    with pytest.raises(UserError, match=r"claims [\d,]+ bytes of weights and holds"):
        load_checkpoint(str(path), "cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that something wanted to fetch from."""
    found: list[str] = []

    def fetch(address: str, *arguments: Any) -> None:
        found.append(address)
        raise FileNotFoundError(address)

    monkeypatch.setattr(remote, "fetch", fetch)
    return found


def test_the_address_of_a_checkpoint_s_data_is_not_asked(run: Path, tmp_path: Path, asked: list[str], capsys) -> None:
    path = as_file(run, tmp_path, {})
    content = torch.load(path, weights_only=True)
    content["anlit"]["data"]["path"] = "s3://somebody/data"
    torch.save(content, path)
    assert main(["generate", str(path), "the cat", "--device", "cpu"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert asked == []
    assert main(["generate", str(path), "the cat", "--tokenizer", "s3://my/data", "--device", "cpu"]) == 2
    assert asked == ["s3://my/data/tokenizer.json"]
