"""A run that starts from another one's weights; refusals of what does not fit."""

from pathlib import Path

import pytest
import torch

from anlit import GPT, AnGPT
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.errors import UserError
from tests.models.tiny import fit, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = fit(tiny(GPT, seed=1), max_steps=2)
    file = tmp_path_factory.mktemp("run") / "best.ckpt"
    model.trainer.save_checkpoint(file)
    return file


def test_the_weights_are_the_checkpoints(checkpoint: Path) -> None:
    model = tiny(GPT, seed=2, context_length=32)  # another length has the same weights
    load_initial_weights(model, str(checkpoint))
    given = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert model.state_dict().keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny(AnGPT), "holds a GPT, but the configuration's model is AnGPT: set --model GPT"),
        (lambda: tiny(GPT, d_model=16), r"embedding.weight is 29×32 in it and 29×16 in the model"),
        (lambda: tiny(GPT, n_layers=3), r"blocks\.2\.\S+ is missing in it and \S+ in the model"),
        (lambda: tiny(GPT, n_layers=1), r"blocks\.1\.\S+ is \S+ in it and missing in the model"),
    ],
)
def test_another_model_is_refused(checkpoint: Path, model, message: str) -> None:
    other = model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_initial_weights(other, str(checkpoint))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_files_that_are_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"initial_weights=\S+nowhere\.ckpt is not a file"):
        load_initial_weights(tiny(GPT), str(tmp_path / "nowhere.ckpt"))
    (tmp_path / "cut.ckpt").write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot be read as a checkpoint"):
        load_initial_weights(tiny(GPT), str(tmp_path / "cut.ckpt"))
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(UserError, match=r"anlit did not write"):
        load_initial_weights(tiny(GPT), str(tmp_path / "foreign.ckpt"))
