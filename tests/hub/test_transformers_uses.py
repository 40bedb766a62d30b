"""What users of transformers do with an exported model.

It equals anlit's model, or it refuses. The row "Qwen3" is GPT+ in an architecture of transformers:
transformers' model passes the same tests.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import (
    GPT,
    NGPT,
    ALiBi,
    AnGPT,
    NoPE,
    RoPE,
    ScaleInvariant,
    SlidingWindow,
    SqrtLogN,
)
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.language_model import LanguageModel
from tests.hub.models import N_NEW, assert_continues_alike, loud, pad_left, read, write
from tests.nn.models.tiny import next_token_loss, random_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

WINDOWS = SlidingWindow(4, SqrtLogN(r=1.2))
MODELS = {
    "Qwen3": (GPT, {"positions": RoPE(fraction=1.0)}),
    "GPT+": (GPT, {"tie_embeddings": True}),
    "nGPT": (NGPT, {}),
    "anGPT": (AnGPT, {}),
    "anGPT, scale-invariant": (AnGPT, {"attention": ScaleInvariant(tau=3.0)}),
    "nGPT, ALiBi": (
        NGPT,
        {"attention": ALiBi(), "positions": NoPE(), "n_heads": 3, "d_model": 24},
    ),
    "nGPT, windows": (NGPT, {"attention": WINDOWS, "n_kv_heads": 1}),
}
ROWS = [
    "Qwen3",
    "GPT+",
    "nGPT",
    "anGPT, scale-invariant",
    # Fast rows have the same blocks. `test_export` has these mechanisms, and padded batches.
    pytest.param("anGPT", marks=pytest.mark.slow),
    pytest.param("nGPT, ALiBi", marks=pytest.mark.slow),
    pytest.param("nGPT, windows", marks=pytest.mark.slow),
]
N_PADDED = 5
TOKENS = random_tokens(2, 12)
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
    ]
)
LATE_POSITIONS = torch.arange(7, 19)[None]
DOCUMENTS = (POSITIONS == 0).cumsum(-1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def original(name: str) -> LanguageModel:
    architecture, settings = MODELS[name]
    return loud(architecture, **settings).eval()


@pytest.fixture(scope="module", params=ROWS)
def folder(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("exported") / "out"
    write(original(request.param), path)
    (path / "name").write_text(request.param)
    return path


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


@pytest.fixture
def custom(hub_model: Any) -> Any:
    if not hub_model.config.model_type.startswith("anlit"):
        pytest.skip("transformers' own model")
    return hub_model


@torch.no_grad()
def test_packed_documents_are_read_apart(anlit_model, hub_model) -> None:
    output = hub_model(TOKENS, position_ids=POSITIONS, use_cache=False)

    assert_close(output.logits, anlit_model(TOKENS, DOCUMENTS))


@torch.no_grad()
def test_packed_documents_are_read_apart_where_the_cache_is_on_by_default(
    anlit_model, custom
) -> None:
    output = custom(TOKENS, position_ids=POSITIONS)

    assert_close(output.logits, anlit_model(TOKENS, DOCUMENTS))
    assert output[-1] is output.logits, "a cache of joined documents was returned"


@torch.no_grad()
def test_one_document_may_begin_at_any_position(anlit_model, hub_model) -> None:
    output = hub_model(TOKENS, position_ids=LATE_POSITIONS, use_cache=False)

    assert_close(output.logits, anlit_model(TOKENS))


@torch.no_grad()
@pytest.mark.parametrize("counts_padding", [False, True])
def test_positions_of_a_padded_batch_may_count_the_padding_or_not(
    counts_padding: bool, anlit_model, hub_model
) -> None:
    tokens, mask = pad_left(TOKENS, N_PADDED)
    positions = mask.cumsum(-1) - 1
    if counts_padding:
        positions = torch.arange(12).expand(2, -1)

    output = hub_model(tokens, attention_mask=mask, position_ids=positions)

    expected = anlit_model(tokens[1:, N_PADDED:])
    assert_close(output.logits[1:, N_PADDED:], expected)


@torch.no_grad()
def test_a_step_with_a_cache_and_its_position(anlit_model, hub_model) -> None:
    cache = transformers.DynamicCache()

    for positions in (range(7), range(7, 8), range(8, 12)):
        step = hub_model(
            TOKENS[:, positions],
            past_key_values=cache,
            position_ids=torch.tensor([positions]),
        )

    logits = anlit_model(TOKENS)
    assert_close(step.logits, logits[:, 8:])


@pytest.mark.parametrize("positions", [POSITIONS, LATE_POSITIONS])
def test_positions_that_contradict_mask_or_cache_are_refused(positions: Tensor, custom) -> None:
    mask = torch.ones_like(TOKENS)
    cache = transformers.DynamicCache()

    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        custom(TOKENS, attention_mask=mask, position_ids=positions)
    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        custom(TOKENS, past_key_values=cache, position_ids=positions)


UNSUPPORTED = [
    {"output_attentions": True},
    {"output_hidden_states": True},
    {"token_type_ids": TOKENS},
    {"cu_seq_lens_q": torch.tensor([0, 5, 12])},
    {"head_mask": torch.ones(2, 2)},
    {"attention_mask": torch.ones(2, 1, 12, 12)},
    {"attention_mask": torch.ones(2, 5)},
    {"past_key_values": ((TOKENS, TOKENS),)},
    {"position_ids": POSITIONS, "use_cache": True},
    {"inputs_embeds": torch.zeros(2, 12, 32)},
]
"""Arguments that the code does not support; the last of each is named in the error."""


@pytest.mark.parametrize("arguments", UNSUPPORTED, ids=", ".join)
def test_an_argument_that_is_not_supported_is_refused_by_its_name(
    arguments: dict[str, Any], custom
) -> None:
    name = list(arguments)[-1]

    with pytest.raises(ValueError, match=name):
        custom(TOKENS, **arguments)


@pytest.mark.parametrize("flag", ["output_attentions", "output_hidden_states"])
def test_a_flag_of_the_configuration_is_refused_too(flag: str, custom) -> None:
    custom.config._attn_implementation = "eager"  # or transformers refuses output_attentions
    setattr(custom.config, flag, True)

    with pytest.raises(ValueError, match=f"{flag} is not supported"):
        custom(TOKENS)


CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_a_padded_batch_is_continued_as_anlit_does(cache: str, anlit_model, hub_model) -> None:
    tokens, mask = pad_left(TOKENS, N_PADDED)

    assert_continues_alike(anlit_model, hub_model, tokens, mask, **CACHES[cache])


@torch.no_grad()
def test_beams_are_those_of_a_model_without_a_cache(hub_model) -> None:
    options = {"max_new_tokens": N_NEW, "num_beams": 3, "do_sample": False}

    with_cache = hub_model.generate(TOKENS, **options)
    without_cache = hub_model.generate(TOKENS, use_cache=False, **options)

    assert with_cache.tolist() == without_cache.tolist()


@torch.no_grad()
def test_embeddings_in_place_of_tokens(hub_model) -> None:
    embed = hub_model.get_input_embeddings()
    embeddings = embed(TOKENS)
    options = {"max_new_tokens": N_NEW, "do_sample": False}

    output = hub_model(inputs_embeds=embeddings)
    continued = hub_model.generate(inputs_embeds=embeddings, **options)

    assert torch.equal(output.logits, hub_model(TOKENS).logits)
    expected = hub_model.generate(TOKENS, **options)
    assert continued.tolist() == expected[:, 12:].tolist()


def test_labels_of_minus_100_do_not_count(anlit_model, hub_model) -> None:
    labels = TOKENS.clone()
    labels[0, 3:9] = IGNORE_INDEX
    n_labels = int((labels[:, 1:] != IGNORE_INDEX).sum())
    logits = anlit_model(TOKENS)[:, :-1]
    expected, _ = next_token_loss(logits, labels[:, 1:])

    mean = hub_model(TOKENS, labels=labels).loss
    accumulated = hub_model(TOKENS, labels=labels, num_items_in_batch=32).loss

    assert_close(mean, expected)
    assert_close(accumulated, expected * n_labels / 32)


@torch.no_grad()
def test_some_logits_and_a_tuple(hub_model) -> None:
    logits = hub_model(TOKENS).logits
    columns = torch.tensor([1, 4])

    last_three = hub_model(TOKENS, logits_to_keep=3).logits
    two = hub_model(TOKENS, logits_to_keep=columns).logits
    first_of_tuple, *_ = hub_model(TOKENS, return_dict=False)

    assert_close(last_three, logits[:, -3:])
    assert_close(two, logits[:, columns])
    assert_close(first_of_tuple, logits)


def gradients(model: Any, **arguments: Any) -> dict[str, Tensor]:
    """The gradients of every weight; none is missing."""
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS, **arguments).loss
    loss.backward()
    copies = {}
    for name, weight in model.named_parameters():
        copies[name] = weight.grad.clone()
    return copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains_and_gives_nearly_the_same(dtype: torch.dtype, hub_model) -> None:
    hub_model.train()
    expected = hub_model(TOKENS).logits
    exact_gradients = gradients(hub_model)

    with torch.autocast("cpu", dtype):
        logits = hub_model(TOKENS).logits
        rough_gradients = gradients(hub_model)

    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.25)
    for name, gradient in rough_gradients.items():
        exact = exact_gradients[name].flatten()
        similarity = torch.cosine_similarity(gradient.flatten(), exact, dim=0)
        assert similarity > 0.9, name


@torch.no_grad()
def test_weights_in_bfloat16_give_nearly_the_same(folder: Path, hub_model) -> None:
    model = read(folder, trust=True, dtype=torch.bfloat16).eval()

    logits = model(TOKENS).logits.float()
    continued = model.generate(TOKENS, max_new_tokens=2, cache_implementation="static")

    dtypes = {weight.dtype for weight in model.parameters()}
    assert dtypes == {torch.bfloat16}
    expected = hub_model(TOKENS).logits
    similarity = torch.cosine_similarity(logits, expected, dim=-1)
    assert similarity.min() > 0.98
    assert continued.shape == (2, 14)


def test_gradient_checkpointing_changes_no_gradient(hub_model) -> None:
    hub_model.train()
    expected = gradients(hub_model)

    for reentrant in (True, False):
        hub_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        recomputed = gradients(hub_model, use_cache=True)
        torch.testing.assert_close(recomputed, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("change", [3, -4])
def test_a_resized_vocabulary_keeps_the_old_tokens(
    change: int, mean_resizing: bool, hub_model
) -> None:
    tokens = TOKENS % 20
    config = hub_model.config
    expected = hub_model(tokens).logits
    old_size = config.vocab_size
    old_norms = hub_model.get_input_embeddings().weight.norm(dim=-1)
    new_size = old_size + change

    hub_model.resize_token_embeddings(new_size, mean_resizing=mean_resizing)

    logits = hub_model(tokens).logits
    n_common = min(old_size, new_size)
    assert config.vocab_size == new_size
    assert logits.shape == (2, 12, new_size)
    assert_close(logits[..., :n_common], expected[..., :n_common])
    embedding = hub_model.get_input_embeddings().weight
    head = hub_model.get_output_embeddings().weight
    assert (embedding is head) == bool(config.tie_word_embeddings)
    if config.model_type in ("anlit_ngpt", "anlit_angpt"):
        new_norms = embedding[old_size:].norm(dim=-1)
        assert_close(new_norms, old_norms.mean().expand(len(new_norms)))
    hub_model.generate(tokens, max_new_tokens=2)


def test_a_trained_model_is_saved_and_read_again(hub_model, tmp_path: Path) -> None:
    hub_model.train()
    optimizer = torch.optim.AdamW(hub_model.parameters(), lr=1e-2)
    hub_model.resize_token_embeddings(hub_model.config.vocab_size + 2)
    gradients(hub_model)
    optimizer.step()

    hub_model.eval().save_pretrained(tmp_path / "saved")
    reloaded = read(tmp_path / "saved", trust=True).eval()

    logits = reloaded(TOKENS).logits
    assert torch.equal(logits, hub_model(TOKENS).logits)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_gives_the_same(anlit_model, hub_model) -> None:
    torch.compiler.reset()
    model = torch.compile(hub_model, backend="eager")
    tokens, mask = pad_left(TOKENS, N_PADDED)

    plain = model(TOKENS).logits
    packed = model(TOKENS, position_ids=POSITIONS, use_cache=False).logits
    padded = model(tokens, attention_mask=mask).logits

    assert_close(plain, anlit_model(TOKENS))
    assert_close(packed, anlit_model(TOKENS, DOCUMENTS))
    expected = anlit_model(tokens[1:, N_PADDED:])
    assert_close(padded[1:, N_PADDED:], expected)


def test_the_trainer_trains_in_bf16(hub_model, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(8, 12)]
    initial_weights = copy.deepcopy(hub_model.state_dict())
    settings = transformers.TrainingArguments(
        str(tmp_path),
        bf16=True,
        use_cpu=True,
        max_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=2,
    )
    hub_model.gradient_checkpointing_enable()
    trainer = transformers.Trainer(hub_model, settings, train_dataset=rows, eval_dataset=rows)

    trainer.train()

    history = trainer.state.log_history
    first, second, *_ = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert second < first
    for name, weight in hub_model.state_dict().items():
        assert not torch.equal(initial_weights[name], weight), name
    reloaded = read(tmp_path / "checkpoint-2", trust=True)
    torch.testing.assert_close(reloaded.state_dict(), hub_model.state_dict(), rtol=0, atol=0)


@torch.no_grad()
def test_a_map_of_devices_splits_no_block(folder: Path, hub_model) -> None:
    pytest.importorskip("accelerate")

    model = read(folder, trust=True, device_map="auto").eval()

    assert_close(model(TOKENS).logits, hub_model(TOKENS).logits)
