"""One matrix for embedding and head, and the reason why nGPT and anGPT have two."""

import pytest
import torch
from safetensors.torch import load_file

from anlit import GPT, MuonAdamW
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.cli import main
from anlit.errors import UserError
from anlit.models.flops import flops_per_token
from anlit.models.runtime import Runtime
from anlit.optim.optimizers import parameter_groups
from tests.models.tiny import SIZE, fit, random_tokens, tiny


def test_one_matrix_is_counted_once_and_trained_at_the_rate_of_the_head() -> None:
    tied, untied = tiny(GPT, tie_embeddings=True), tiny(GPT)
    saved = SIZE["vocab_size"] * SIZE["d_model"]
    assert untied.model.n_parameters() - tied.model.n_parameters() == saved
    assert flops_per_token(tied.model, 16) == flops_per_token(untied.model, 16)
    optimizer = MuonAdamW(parameter_groups(tied.model), embedding_lr=0.3, head_lr=0.002)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert "embedding" not in rates
    assert rates["head"] == 0.002


@pytest.mark.parametrize("meta", [False, True], ids=["drawn at once", "drawn late"])
def test_it_stays_one_matrix(meta, tmp_path) -> None:
    model = fit(tiny(GPT, tie_embeddings=True, runtime=Runtime(meta_init=meta)), max_steps=3)
    assert model.model.head.weight is model.model.embedding.weight
    assert torch.equal(model.model.head.weight, fit(tiny(GPT, tie_embeddings=True), 3).model.embedding.weight)


def test_a_tied_run_begins_with_a_tied_export_and_not_with_two_matrices(tmp_path) -> None:
    """The export holds the matrix once."""
    for name, tied in (("two", False), ("tied", True)):
        model = fit(tiny(GPT, tie_embeddings=tied), 1, default_root_dir=str(tmp_path))
        model.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        assert main(["export", str(tmp_path / f"{name}.ckpt"), "--output", str(tmp_path / name)]) == 0
    assert "head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    again = tiny(GPT, seed=5, tie_embeddings=True)
    load_initial_weights(again, str(tmp_path / "tied"))
    tokens = random_tokens(1, 8)
    assert torch.equal(again.model.eval()(tokens), model.model.eval()(tokens))
    with pytest.raises(UserError, match=r"embedding and a head that differ: leave out model\.tie_embeddings"):
        load_initial_weights(again, str(tmp_path / "two.ckpt"))
