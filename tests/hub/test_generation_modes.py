"""The ways in which transformers' `generate` continues an exported model with its tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit import GPT, NGPT, AnGPT
from tests.evaluation.saved import make_run_with_text
from tests.hub.models import export_to_transformers, read

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

TEXT = "the cat sat on the mat and the cat"
N_NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": N_NEW}
SETTINGS: dict[Any, dict[str, Any]] = {
    GPT: {"init_std": 0.2},
    NGPT: {"s_z_init": 8.0},
    AnGPT: {"s_z_init": 8.0},
}


@pytest.fixture(scope="module", params=SETTINGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in a copy, as of a download."""
    path = tmp_path_factory.mktemp("text")
    run = make_run_with_text(path, request.param, context_length=64, **SETTINGS[request.param])
    out = export_to_transformers(run, path / "out")
    return Path(shutil.copytree(out, path / "copy"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@pytest.fixture
def hub_model(folder: Path) -> Any:
    return read(folder, trust=True).eval()


@pytest.fixture
def prompt(tokenizer: Any) -> Any:
    return tokenizer(TEXT, return_tensors="pt")


@pytest.fixture
def continuation(hub_model: Any, prompt: Any) -> list[int]:
    """The new tokens, one by one."""
    tokens = hub_model.generate(**prompt, **GREEDY)[0].tolist()
    return tokens[prompt["input_ids"].shape[1] :]


def new_tokens(hub_model: Any, prompt: Any, **options: Any) -> list[int]:
    tokens = hub_model.generate(**prompt, **GREEDY, **options)[0].tolist()
    return tokens[prompt["input_ids"].shape[1] :]


def test_a_text_ends_the_continuation(hub_model, tokenizer, prompt, continuation) -> None:
    stop = next(filter(str.isalpha, tokenizer.decode(continuation)))

    tokens = new_tokens(hub_model, prompt, stop_strings=[stop], tokenizer=tokenizer)

    assert tokens == continuation[: len(tokens)]
    assert len(tokens) < N_NEW
    assert stop in tokenizer.decode(tokens)
    assert stop not in tokenizer.decode(tokens[:-1])


def test_a_small_model_assists(folder: Path, hub_model, prompt, continuation) -> None:
    assistant = read(folder, trust=True).eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    assert new_tokens(hub_model, prompt, assistant_model=assistant) == continuation


def test_the_prompt_is_looked_up(hub_model, prompt, continuation) -> None:
    assert new_tokens(hub_model, prompt, prompt_lookup_num_tokens=3) == continuation


def test_a_streamer_gets_the_text(hub_model, tokenizer, prompt, continuation) -> None:
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)

    new_tokens(hub_model, prompt, streamer=streamer)

    assert "".join(streamer) == tokenizer.decode(continuation)


def test_a_pipeline_answers(folder: Path, tokenizer, continuation) -> None:
    pipe = transformers.pipeline(
        "text-generation", model=str(folder), trust_remote_code=True, device="cpu"
    )

    (answer,) = pipe(TEXT, return_full_text=False, **GREEDY)

    text = tokenizer.decode(continuation, skip_special_tokens=True)
    assert answer["generated_text"] == text
