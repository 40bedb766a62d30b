"""From folders and files to models, and every file that is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anlit import GPT, AnGPT, LogN, PRoPE
from anlit.checkpoints.loading import describe, load_checkpoint
from anlit.errors import UserError
from anlit.evaluation.data import data_of
from tests.checkpoints.foreign import as_export, as_file, content_of
from tests.evaluation.saved import LENGTH, VOCABULARY, make_run, prepare, save, small
from tests.models.tiny import random_tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "angpt"
    return make_run(folder, data, AnGPT, positions=PRoPE(), document_masking=False)


def refused(path: object, **settings: object) -> str:
    with pytest.raises(UserError) as error:
        load_checkpoint(str(path), **settings)  # type: ignore[arg-type]
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_the_model_of_a_run_is_rebuilt_as_it_was_saved(run: Path) -> None:
    checkpoint = load_checkpoint(str(run), "cpu")
    saved = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    for name, weight in checkpoint.model.state_dict().items():
        assert torch.equal(weight, saved["state_dict"][name]), name
    assert type(checkpoint.model) is AnGPT
    assert not checkpoint.model.model.document_masking
    assert not checkpoint.model.training
    assert not any(weight.requires_grad for weight in checkpoint.model.parameters())
    assert checkpoint.label == "anGPT, scale-invariant"
    assert (checkpoint.step, checkpoint.training_length, checkpoint.run) == (1, LENGTH, run)
    assert checkpoint.config is not None
    assert checkpoint.config["seed_everything"] == 1
    assert describe(checkpoint)["architecture"] == "AnGPT"


def test_weights_of_another_precision_become_float32(tmp_path: Path) -> None:
    file = save(small(GPT), tmp_path / "a.ckpt")
    content = torch.load(file, weights_only=True)
    content["state_dict"] = {name: weight.double() for name, weight in content["state_dict"].items()}
    torch.save(content, file)
    assert {weight.dtype for weight in load_checkpoint(str(file)).model.parameters()} == {torch.float32}


def test_a_folder_means_its_best_checkpoint_and_else_its_last(tmp_path: Path, data: Path) -> None:
    folder = make_run(tmp_path / "run", data, GPT, name="last")
    assert load_checkpoint(str(folder)).file == folder / "checkpoints" / "last.ckpt"
    make_run(folder, data, GPT, name="best")
    assert load_checkpoint(str(folder)).file == folder / "checkpoints" / "best.ckpt"
    assert load_checkpoint(str(folder / "checkpoints" / "last.ckpt")).file.name == "last.ckpt"


def test_constructor_arguments_can_be_replaced(tmp_path: Path) -> None:
    file = save(small(GPT, attention=LogN()), tmp_path / "a.ckpt")
    chosen = [load_checkpoint(str(file), backend=name).model for name in ("eager", "sdpa")]
    assert [model.model.blocks[0].attention.backend for model in chosen] == ["eager", "sdpa"]
    tokens = random_tokens(2, LENGTH)
    torch.testing.assert_close(chosen[0](tokens), chosen[1](tokens), rtol=1e-4, atol=1e-4)


def test_what_is_no_checkpoint_of_anlit_is_refused(tmp_path: Path, run: Path) -> None:
    """Damaged ones: tests/integration/test_damaged_checkpoints.py."""
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no checkpoints/best.ckpt or last.ckpt" in refused(tmp_path)
    for content in ((run / "checkpoints" / "best.ckpt").read_bytes()[:2000], b"not a checkpoint\n", b""):
        (tmp_path / "a.ckpt").write_bytes(content)
        assert "a.ckpt cannot be read as a checkpoint (a.ckpt is empty, cut short" in refused(tmp_path / "a.ckpt")


def test_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    file = save(small(GPT), tmp_path / "a.ckpt")
    content = torch.load(file, weights_only=True)

    def without(weight: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in content["state_dict"].items() if name != weight}

    for changed, sentence in (
        ({"anlit": None}, "anlit did not write it"),
        ({"anlit": {**content["anlit"], "architecture": "Mamba"}}, "names 'Mamba', which is no LanguageModel of anlit"),
        ({"anlit": {**content["anlit"], "data": 5}}, "anlit.data is int in place of dict"),
        ({"hyper_parameters": None}, "hyper_parameters is missing"),
        ({"state_dict": {"a": 5}}, "not all of state_dict are tensors"),
        ({"state_dict": without("model.embedding.weight")}, "has no matrix model.embedding.weight among its weights"),
        ({"state_dict": without("model.head.weight")}, 'Missing key(s) in state_dict: "model.head.weight"'),
    ):
        torch.save(content | changed, file)
        assert sentence in refused(file)


def test_a_device_that_is_not_there_is_refused(run: Path) -> None:
    assert "--device warp cannot be used" in refused(run, device="warp")
    assert "--device cuda:99 cannot be used" in refused(run, device="cuda:99")


def test_data_are_those_of_the_run_or_of_the_same_tokenizer(run: Path, data: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(run))
    own = data_of(checkpoint)
    assert (own.path, own.batch_size, own.context_length) == (str(data), 4, LENGTH)
    alone = load_checkpoint(str(save(small(GPT), tmp_path / "alone.ckpt")))
    assert (alone.config, alone.run, alone.trained_on) == (None, None, None)
    other = prepare(tmp_path / "other", tokenizer_sha256="8" * 64)
    for sentence, given, path in (
        ("trained with another tokenizer (777777777777…)", checkpoint, str(other)),
        ("set --data to a prepared folder", checkpoint, str(tmp_path / "nowhere")),
        ("is not in a run folder that names its data: set --data", alone, None),
        (f"vocabulary of 29 tokens and the shards in {other} have {VOCABULARY}", alone, str(other)),
    ):
        with pytest.raises(UserError) as error:
            data_of(given, path)
        assert sentence in str(error.value)
        assert "--data.path" not in str(error.value)


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
