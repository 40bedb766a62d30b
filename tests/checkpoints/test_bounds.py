"""A small file does not make a large model, and an address in a file is not asked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.storage import remote
from anlit.errors import UserError
from tests.checkpoints.foreign import as_export, as_file, content_of


@pytest.mark.parametrize("setting", ["n_layers", "vocab_size", "d_model", "d_ff"])
@pytest.mark.parametrize("form", [as_file, as_export])
@pytest.mark.covering(1)
def test_settings_of_a_larger_model_than_the_weights_are_refused(
    form: Any, setting: str, trained_run: Path, tmp_path: Path
) -> None:
    path = form(trained_run, tmp_path, {setting: 10**9})
    with pytest.raises(UserError, match=f"says that {setting} is 1000000000, but its weights are those of {setting}="):
        load_checkpoint(str(path), "cpu")


def test_weights_that_are_views_of_a_small_tensor_are_refused(trained_run: Path, tmp_path: Path) -> None:
    content = content_of(trained_run, {"vocab_size": 10**9, "d_model": 10**6})
    content["state_dict"]["model.embedding.weight"] = torch.zeros(1).expand(10**9, 10**6)
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"claims [\d,]+ bytes of weights and holds"):
        load_checkpoint(str(tmp_path / "a.ckpt"), "cpu")


def test_the_address_of_a_checkpoint_s_data_is_not_asked(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    asked = []

    def fetch(address: str, *arguments: Any) -> None:
        asked.append(address)
        raise FileNotFoundError(address)

    monkeypatch.setattr(remote, "fetch", fetch)
    content = content_of(trained_run)
    content["anlit"]["data"]["path"] = "s3://somebody/data"
    torch.save(content, tmp_path / "a.ckpt")
    generate = ["generate", str(tmp_path / "a.ckpt"), "the cat", "--device", "cpu"]
    assert main(generate) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert asked == []
    assert main([*generate, "--tokenizer", "s3://my/data"]) == 2
    assert asked == ["s3://my/data/tokenizer.json"]
