"""The callback Samples in a user's Trainer."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from anlit import GPT, Mixture, Samples, TokenShards
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError
from anlit.evaluation.samples import document_beginnings
from anlit.nn.attention.attention import attention_layers
from anlit.nn.models.runtime import Runtime
from tests.data.modules import quiet_trainer
from tests.data.prepared import END, VOCABULARY, write_prepared
from tests.evaluation.saved import LENGTH, TEXTS

TOKENIZER = train_bpe(TEXTS, VOCABULARY - 10)
SIZE = {
    "vocab_size": VOCABULARY,
    "context_length": LENGTH,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 32,
}
VALIDATION = {"max_steps": 4, "val_check_interval": 2, "check_val_every_n_epoch": None}


def write_texts(folder: Path, texts: list[str], document_token_at: str = "end") -> Path:
    """A prepared folder with `texts` as the documents of both splits."""
    tokens: list[int] = []
    for text in texts:
        document = TOKENIZER.encode(text).ids
        if document_token_at == "end":
            tokens += [*document, END]
        else:
            tokens += [END, *document]
    val = np.array(tokens, "uint16")
    streams = {"train": np.tile(val, 40), "val": val}
    write_prepared(folder, streams, document_token_at=document_token_at)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "shards", TEXTS)


def train(
    shards: Path, folder: Path, callbacks: list[L.Callback], logger: Any = False, **settings: Any
) -> GPT:
    """Train for four steps with two validations."""
    torch.manual_seed(0)
    model = GPT(**SIZE, **settings)
    data = TokenShards(str(shards), batch_size=2)
    trainer = quiet_trainer(
        **VALIDATION, callbacks=callbacks, logger=logger, default_root_dir=folder
    )
    trainer.fit(model, data)
    return model


def read_samples(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def test_compiled_blocks_see_no_length_of_a_sample(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further length would be a compilation."""
    lengths = set()

    def compile_block(forward: Any, **settings: Any) -> Any:
        def run(h: torch.Tensor, *arguments: Any) -> Any:
            lengths.add(h.shape[1])
            return forward(h, *arguments)

        return run

    eager = tmp_path / "eager"
    compiled = tmp_path / "compiled"
    train(shards, eager, [Samples(["the cat"], 8)])
    monkeypatch.setattr(torch, "compile", compile_block)
    runtime = Runtime(compile=True, recompute_every=2)
    train(shards, compiled, [Samples(["the cat"], 8)], runtime=runtime)

    texts = [sample["text"] for sample in read_samples(compiled)]
    eager_texts = [sample["text"] for sample in read_samples(eager)]
    assert lengths == {LENGTH}
    assert texts == eager_texts


class Watch(L.Callback):
    """Compares modes, random numbers and kernels around the samples."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0:
            layers = attention_layers(pl_module)
            state = {
                "random numbers": torch.get_rng_state().tolist(),
                "numpy's random numbers": str(np.random.get_state()),
                "training": [module.training for module in pl_module.modules()],
                "may compile": [layer.may_compile for layer in layers],
                "kernels": [dict(layer.kernels) for layer in layers],
                "inference mode": torch.is_inference_mode_enabled(),
            }
            self.states.append(state)


def test_nothing_of_the_model_and_of_random_numbers_changes(shards: Path, tmp_path: Path) -> None:
    first_watch = Watch()
    last_watch = Watch()

    callbacks = [first_watch, Samples(["the cat"], 8), last_watch]
    train(shards, tmp_path, callbacks, dropout=0.5)

    assert len(last_watch.states) == 3  # with the validation before the first step
    assert last_watch.states == first_watch.states


class Wandb(WandbLogger):
    """Weights & Biases without its package: keeps tables."""

    def __init__(self) -> None:
        self.tables: list[Any] = []

    name = version = save_dir = experiment = None  # type: ignore[assignment]

    def log_metrics(self, *_: Any, **settings: Any) -> None: ...
    def log_hyperparams(self, *_: Any, **settings: Any) -> None: ...
    def finalize(self, *_: Any) -> None: ...
    def after_save_checkpoint(self, *_: Any) -> None: ...
    def log_text(self, key: str, columns: Any = None, data: Any = None, **settings: Any) -> None:
        self.tables.append((key, columns, data, settings))


def test_weights_and_biases_gets_a_table_per_validation(shards: Path, tmp_path: Path) -> None:
    logger = Wandb()

    train(shards, tmp_path, [Samples(["the cat", "the dog"], 8)], logger)

    samples = read_samples(tmp_path)
    assert [sample["step"] for sample in samples] == [1, 1, 3, 3]
    first_table, second_table = logger.tables
    check_table(first_table, samples[:2])
    check_table(second_table, samples[2:])


def check_table(table: Any, samples: list[dict[str, Any]]) -> None:
    """A table of Weights & Biases has the samples of a validation."""
    key, columns, rows, settings = table
    assert key == "samples"
    assert columns == ["step", "tokens", "prompt", "text"]
    assert settings == {"step": samples[0]["step"]}
    for row, sample in zip(rows, samples, strict=True):
        assert dict(zip(columns, row, strict=True)) == sample


@pytest.mark.parametrize("token_at", ["end", "start"])
def test_default_prompts_begin_documents_that_differ(token_at: str, tmp_path: Path) -> None:
    texts = ["the cat sat", "", "the cat sat", "and the dog", "naïve", "café", "by the cat"]
    folder = write_texts(tmp_path / "data", texts, token_at)

    prompts = document_beginnings(TokenShards(str(folder)), TOKENIZER)

    assert prompts == ["the cat sat", "and the dog", "naïve", "café"]


def test_a_long_document_is_cut_between_characters(tmp_path: Path) -> None:
    text = "x" * 15 + "☕☕"
    folder = write_texts(tmp_path / "data", [text])
    assert len(TOKENIZER.encode(text).ids) > 16

    (prompt,) = document_beginnings(TokenShards(str(folder)), TOKENIZER)

    assert prompt
    assert text.startswith(prompt)


def test_folders_of_a_mixture_take_turns(tmp_path: Path) -> None:
    first = write_texts(tmp_path / "first", ["one", "two", "three", "four"])
    second = write_texts(tmp_path / "second", ["the cat", "the dog"])
    data = Mixture({"a": str(first), "b": str(second)})

    prompts = document_beginnings(data, TOKENIZER)

    assert prompts == ["one", "the cat", "two", "the dog"]


def check_refusal(samples: Samples, sentence: str, **changes: Any) -> None:
    """A run on a user's loader is refused before the first step."""
    trainer = quiet_trainer(**VALIDATION, callbacks=[samples])
    batches = torch.utils.data.DataLoader([torch.zeros(1)])

    with pytest.raises(UserError, match=sentence):
        trainer.fit(GPT(**SIZE | changes), batches, batches)

    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (
            Samples(["a"]),
            "Samples needs a tokenizer, which the loader does not give: set the tokenizer",
        ),
        (Samples(tokenizer="tokenizer.json"), "Samples needs prompts for data of your own"),
    ],
)
def test_data_of_ones_own_need_settings(callback: Samples, sentence: str) -> None:
    check_refusal(callback, sentence)


@pytest.mark.parametrize(
    ("tokenizer", "sentence"),
    [
        ("tokenizer.json", "the model knows 200: set the tokenizer of Samples to the one"),
        ("nowhere.json", "no tokenizer at .*nowhere.json: set the tokenizer of Samples"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_first_step(
    tmp_path: Path, tokenizer: str, sentence: str
) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    samples = Samples(["a"], tokenizer=str(tmp_path / tokenizer))

    check_refusal(samples, sentence, vocab_size=200)


def test_a_file_of_prompts_is_read_as_by_anlit_generate(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "the cat"}\n{"prompt": "the dog"}\n')
    text = tmp_path / "prompt.txt"
    text.write_text("the cat\nand the dog")

    assert Samples(str(lines)).prompts == ["the cat", "the dog"]
    assert Samples(str(text)).prompts == ["the cat\nand the dog"]


class Lines(L.LightningDataModule):
    """A user's data with a tokenizer."""

    tokenizer = TOKENIZER
    val_dataloader = train_dataloader = None


def test_data_of_ones_own_read_no_special_tokens_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    monkeypatch.chdir(tmp_path)
    trainer = quiet_trainer(default_root_dir=tmp_path / "run")
    trainer.datamodule = Lines()
    samples = Samples(["the cat"])

    samples.on_fit_start(trainer, GPT(**SIZE))

    assert samples._session is not None
    assert samples._session.tokenizer.special_tokens.eos_tokens == ()
