"""What users of transformers do with an exported model: it gives what anlit's own model gives, or refuses.

The row "Qwen3" is GPT+ in an architecture of transformers: it holds the tests to what transformers itself does.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import GPT, NGPT, ALiBi, AnGPT, NoPE, RoPE, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.language_model import LanguageModel
from tests.hub.published import read
from tests.hub.test_export import N_NEW, greedy, loud, write
from tests.nn.models.tiny import next_token_loss, random_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3": (GPT, {"positions": RoPE(fraction=1.0)}),
    "GPT+": (GPT, {"tie_embeddings": True}),
    "nGPT": (NGPT, {}),
    "anGPT": (AnGPT, {}),
    "anGPT, scale-invariant": (AnGPT, {"attention": ScaleInvariant(tau=3.0)}),
    "nGPT, ALiBi": (NGPT, {"attention": ALiBi(), "positions": NoPE(), "n_heads": 3, "d_model": 24}),
    "nGPT, windows": (NGPT, {"attention": SlidingWindow(4, SqrtLogN(r=1.2)), "n_kv_heads": 1}),
}
TOKENS = random_tokens(2, 12)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [*range(7), *range(5)]])
DOCUMENTS = (POSITIONS == 0).cumsum(-1)
SEES = {"rtol": 1e-5, "atol": 1e-5}


ROWS = [
    pytest.param(name, marks=pytest.mark.slow) if name == "nGPT, windows" else name
    for name in MODELS
]


@pytest.fixture(scope="module", params=ROWS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "out"
    write(original(request.param), path)
    (path / "name").write_text(request.param)
    return path


def original(name: str) -> LanguageModel:
    architecture, settings = MODELS[name]
    return loud(architecture, **settings).eval()


@pytest.fixture(scope="module")
def anlit_model(folder: Path) -> LanguageModel:
    return original((folder / "name").read_text())


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return read(folder, trust=True).eval()


@pytest.fixture
def hub_model(loaded: Any) -> Any:
    """A copy that the test may change."""
    return copy.deepcopy(loaded)


def is_custom(model: Any) -> bool:
    return model.config.model_type.startswith("anlit")


@pytest.fixture
def custom(hub_model: Any) -> Any:
    if not is_custom(hub_model):
        pytest.skip("transformers' own model")
    return hub_model


def padded() -> tuple[Tensor, Tensor]:
    """Two prompts, the second shorter and padded on the left, and their mask."""
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    tokens[1, :5] = 0
    mask[1, :5] = 0
    return tokens, mask


@torch.no_grad()
def test_packed_documents_are_read_apart(anlit_model: LanguageModel, hub_model: Any) -> None:
    logits = hub_model(TOKENS, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(logits, anlit_model(TOKENS, DOCUMENTS), **SEES)


@torch.no_grad()
def test_packed_documents_are_read_apart_where_the_cache_is_on_by_default(
    anlit_model: LanguageModel, custom: Any
) -> None:
    output = custom(TOKENS, position_ids=POSITIONS)
    torch.testing.assert_close(output.logits, anlit_model(TOKENS, DOCUMENTS), **SEES)
    assert output[-1] is output.logits, "a cache of joined documents was returned"


@torch.no_grad()
def test_one_document_may_begin_at_any_position(anlit_model: LanguageModel, hub_model: Any) -> None:
    positions = torch.arange(7, 19)[None]
    logits = hub_model(TOKENS, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, anlit_model(TOKENS), **SEES)


@torch.no_grad()
@pytest.mark.parametrize("counts_padding", [False, True])
def test_positions_of_a_padded_batch_may_count_the_padding_or_not(
    counts_padding: bool, anlit_model: LanguageModel, hub_model: Any
) -> None:
    tokens, mask = padded()
    positions = torch.arange(12).expand(2, -1) if counts_padding else mask.cumsum(-1) - 1
    logits = hub_model(tokens, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[1:, 5:], anlit_model(tokens[1:, 5:]), **SEES)


@torch.no_grad()
def test_a_step_with_a_cache_and_its_position(anlit_model: LanguageModel, hub_model: Any) -> None:
    cache = transformers.DynamicCache()
    for start, end in ((0, 7), (7, 8), (8, 12)):
        positions = torch.arange(start, end)[None]
        step = hub_model(TOKENS[:, start:end], past_key_values=cache, position_ids=positions)
    torch.testing.assert_close(step.logits, anlit_model(TOKENS)[:, 8:], **SEES)


@pytest.mark.parametrize("positions", [POSITIONS, torch.arange(7, 19)[None]])
def test_positions_that_contradict_mask_or_cache_are_refused(
    positions: Tensor, custom: Any
) -> None:
    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        custom(TOKENS, attention_mask=torch.ones_like(TOKENS), position_ids=positions)
    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        custom(TOKENS, past_key_values=transformers.DynamicCache(), position_ids=positions)


@pytest.mark.parametrize("arguments", [
    {"output_attentions": True}, {"output_hidden_states": True}, {"token_type_ids": TOKENS},
    {"cu_seq_lens_q": torch.tensor([0, 5, 12])}, {"head_mask": torch.ones(2, 2)},
    {"attention_mask": torch.ones(2, 1, 12, 12)}, {"attention_mask": torch.ones(2, 5)},
    {"past_key_values": ((TOKENS, TOKENS),)}, {"position_ids": POSITIONS, "use_cache": True},
    {"inputs_embeds": torch.zeros(2, 12, 32)},
], ids=lambda arguments: ", ".join(arguments))  # fmt: skip
def test_what_the_code_does_not_do_is_refused_by_its_name(arguments: Any, custom: Any) -> None:
    *_, name = arguments
    with pytest.raises(ValueError, match=name):
        custom(TOKENS, **arguments)


@pytest.mark.parametrize("flag", ["output_attentions", "output_hidden_states"])
def test_what_the_configuration_asks_for_is_refused_too(flag: str, custom: Any) -> None:
    custom.config._attn_implementation = "eager"  # or transformers refuses output_attentions
    setattr(custom.config, flag, True)
    with pytest.raises(ValueError, match=f"{flag} is not supported"):
        custom(TOKENS)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_a_padded_batch_is_continued_as_anlit_does(
    cache: str | None, anlit_model: LanguageModel, hub_model: Any
) -> None:
    tokens, mask = padded()
    options = {"cache_implementation": cache} if cache else {"use_cache": False}
    output = hub_model.generate(
        tokens, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False, **options
    ).tolist()
    assert output[0] == greedy(anlit_model, tokens[0].tolist())
    assert output[1][5:] == greedy(anlit_model, tokens[1, 5:].tolist())


@torch.no_grad()
def test_beams_are_those_of_a_model_without_a_cache(hub_model: Any) -> None:
    options = {"max_new_tokens": N_NEW, "num_beams": 3, "do_sample": False}
    output = hub_model.generate(TOKENS, **options)
    assert output.tolist() == hub_model.generate(TOKENS, use_cache=False, **options).tolist()


@torch.no_grad()
def test_embeddings_in_place_of_tokens(hub_model: Any) -> None:
    embeddings = hub_model.get_input_embeddings()(TOKENS)
    expected = hub_model(TOKENS).logits
    torch.testing.assert_close(hub_model(inputs_embeds=embeddings).logits, expected, rtol=0, atol=0)
    options = {"max_new_tokens": N_NEW, "do_sample": False}
    continued = hub_model.generate(inputs_embeds=embeddings, **options)
    assert continued.tolist() == hub_model.generate(TOKENS, **options)[:, 12:].tolist()


def test_labels_of_minus_100_do_not_count(anlit_model: LanguageModel, hub_model: Any) -> None:
    labels = TOKENS.clone()
    labels[0, 3:9] = IGNORE_INDEX
    expected, _ = next_token_loss(anlit_model(TOKENS)[:, :-1], labels[:, 1:])
    torch.testing.assert_close(hub_model(TOKENS, labels=labels).loss, expected, **SEES)
    accumulated = hub_model(TOKENS, labels=labels, num_items_in_batch=32).loss
    n_labels = int((labels[:, 1:] != IGNORE_INDEX).sum())
    torch.testing.assert_close(accumulated, expected * n_labels / 32, **SEES)


@torch.no_grad()
def test_some_logits_and_a_tuple(hub_model: Any) -> None:
    expected = hub_model(TOKENS).logits
    torch.testing.assert_close(hub_model(TOKENS, logits_to_keep=3).logits, expected[:, -3:])
    chosen = torch.tensor([1, 4])
    torch.testing.assert_close(hub_model(TOKENS, logits_to_keep=chosen).logits, expected[:, chosen])
    logits, *_ = hub_model(TOKENS, return_dict=False)
    torch.testing.assert_close(logits, expected)


def gradients(model: Any, **arguments: Any) -> dict[str, Tensor]:
    """Those of every weight; none is missing."""
    model.zero_grad()
    model(TOKENS, labels=TOKENS, **arguments).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains_and_gives_nearly_the_same(dtype: torch.dtype, hub_model: Any) -> None:
    hub_model.train()
    expected, exact = hub_model(TOKENS).logits, gradients(hub_model)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(hub_model(TOKENS).logits.float(), expected, rtol=0.1, atol=0.25)
        rough = gradients(hub_model)
    for name, gradient in rough.items():
        alike = torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
        assert alike > 0.9, name


@torch.no_grad()
def test_weights_in_bfloat16_give_nearly_the_same(folder: Path, hub_model: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16
    ).eval()
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    logits, expected = model(TOKENS).logits.float(), hub_model(TOKENS).logits
    assert torch.cosine_similarity(logits, expected, dim=-1).min() > 0.98
    assert model.generate(TOKENS, max_new_tokens=2, cache_implementation="static").shape == (2, 14)


def test_gradient_checkpointing_changes_no_gradient(hub_model: Any) -> None:
    hub_model.train()
    expected = gradients(hub_model)
    for reentrant in (True, False):
        hub_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for name, gradient in gradients(hub_model, use_cache=True).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("change", [3, -4])
def test_a_resized_vocabulary_keeps_the_old_tokens(change: int, mean: bool, hub_model: Any) -> None:
    expected, old_size = hub_model(TOKENS % 20).logits, hub_model.config.vocab_size
    old_norms = hub_model.get_input_embeddings().weight.norm(dim=-1)
    hub_model.resize_token_embeddings(old_size + change, mean_resizing=mean)
    logits = hub_model(TOKENS % 20).logits
    n_common = min(old_size, old_size + change)
    assert logits.shape[-1] == hub_model.config.vocab_size == old_size + change
    torch.testing.assert_close(logits[..., :n_common], expected[..., :n_common])
    weights = hub_model.get_input_embeddings().weight, hub_model.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == bool(hub_model.config.tie_word_embeddings)
    new_norms = weights[0][old_size:].norm(dim=-1)
    if hub_model.config.model_type in ("anlit_ngpt", "anlit_angpt"):
        torch.testing.assert_close(new_norms, old_norms.mean().expand(len(new_norms)))
    hub_model.generate(TOKENS % 20, max_new_tokens=2)


def test_a_trained_model_is_saved_and_read_again(hub_model: Any, tmp_path: Path) -> None:
    hub_model.train()
    optimizer = torch.optim.AdamW(hub_model.parameters(), lr=1e-2)
    hub_model.resize_token_embeddings(hub_model.config.vocab_size + 2)
    gradients(hub_model)
    optimizer.step()
    hub_model.eval().save_pretrained(tmp_path / "saved")
    reloaded = read(tmp_path / "saved", trust=True).eval()
    torch.testing.assert_close(reloaded(TOKENS).logits, hub_model(TOKENS).logits, rtol=0, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_gives_the_same(anlit_model: LanguageModel, hub_model: Any) -> None:
    torch.compiler.reset()
    model = torch.compile(hub_model, backend="eager")
    tokens, mask = padded()
    torch.testing.assert_close(model(TOKENS).logits, anlit_model(TOKENS), **SEES)
    torch.testing.assert_close(
        model(TOKENS, position_ids=POSITIONS, use_cache=False).logits,
        anlit_model(TOKENS, DOCUMENTS),
        **SEES,
    )
    torch.testing.assert_close(
        model(tokens, attention_mask=mask).logits[1, 5:], anlit_model(tokens[1:, 5:])[0], **SEES
    )


def test_the_trainer_trains_in_bf16(hub_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(8, 12)]
    initial_weights = copy.deepcopy(hub_model.state_dict())
    settings = transformers.TrainingArguments(
        str(tmp_path), bf16=True, use_cpu=True, max_steps=2, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
        eval_strategy="steps", eval_steps=1, save_steps=2,
    )  # fmt: skip
    hub_model.gradient_checkpointing_enable()
    trainer = transformers.Trainer(hub_model, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[1] < losses[0]
    assert not any(
        torch.equal(initial_weights[name], value) for name, value in hub_model.state_dict().items()
    )
    reloaded = read(tmp_path / "checkpoint-2", trust=True)
    torch.testing.assert_close(reloaded.state_dict(), hub_model.state_dict(), rtol=0, atol=0)


@torch.no_grad()
def test_a_map_of_devices_splits_no_block(folder: Path, hub_model: Any) -> None:
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, device_map="auto"
    )
    torch.testing.assert_close(model.eval()(TOKENS).logits, hub_model(TOKENS).logits)
