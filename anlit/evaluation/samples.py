"""Samples of a model's text at each validation of its training."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from tokenizers import Tokenizer
from torch.distributed.fsdp import FSDPModule

from anlit.checkpoints.location import CHECKPOINTS, LAST
from anlit.data.attributes import fingerprint_of, name_of, tokenizer_content_of
from anlit.data.batch import document_ids
from anlit.data.module import TokenShards
from anlit.data.storage.store import TokenStore
from anlit.errors import UserError
from anlit.evaluation.documents import read_documents
from anlit.evaluation.generation import Request, Sampling
from anlit.evaluation.text_generation import continue_requests
from anlit.evaluation.text_stream import REPLACEMENT, decode_continuation
from anlit.evaluation.tokenizer import (
    CheckpointTokenizer,
    checkpoint_tokenizer,
    load_checkpoint_tokenizer,
)
from anlit.io.write import appending, write_text
from anlit.nn.models.runtime import uncompiled
from anlit.reporting.text import json_line
from anlit.runs.folders import SAMPLES
from anlit.training.callbacks.attention_statistics import require_positive
from anlit.training.callbacks.checkpoints import end_after_log_error
from anlit.training.callbacks.throughput import Throughput
from anlit.training.lightning_internals import (
    call_noting_errors,
    callbacks_of_class,
    data_module_of,
)
from anlit.training.load_model import Checkpoint

UNWRITTEN = "unwritten_samples"
"""The key in a checkpoint of the lines that are not in the file."""
COLUMNS = ["step", "tokens", "prompt", "text"]
"""The columns of the table in Weights & Biases, and the keys of a line of `SAMPLES`."""
N_DOCUMENTS = 4
"""Documents of the validation split whose first words are the default prompts."""
N_FIRST_TOKENS = 16
"""Tokens of a default prompt, at most."""
SEARCHED_TOKENS = 1 << 16
"""Tokens of each validation array in which the beginnings of documents are searched."""


class Samples(L.Callback):
    """Continues prompts at each validation of a training, with the weights that are validated.

    The text goes to TensorBoard (TEXT), to a table in Weights & Biases, and to samples.jsonl in the
    run folder. A line has `prompt` and `text`, and `step` and `tokens` as in the row of val/loss. A
    continued run removes the lines that it writes again. If the training is in float32,
    `anlit generate` prints the same text for the same checkpoint and settings.

    Training does not change. The model is in eval mode and has no gradient. No number of the global
    generators is drawn. The blocks run uncompiled. Rank 0 generates while other ranks wait; all
    ranks of a sharded model generate together. The time does not count as training. The
    validation before the first step writes no sample.

    Args:
        prompts: Texts, or a file as in `anlit generate --prompts`: a text that is one prompt, or
            .jsonl of {"prompt": …}. By default the first words of four documents of the
            validation split.
        max_tokens: Tokens of a continuation, at most. Each is a forward pass for all prompts.
        temperature: Logits are divided by it; 0 takes the most probable token.
        top_k: Draw among this many of the most probable tokens. Null for all.
        top_p: Draw among the fewest of these tokens that together have at least this probability.
            Null for all of them.
        seed: Seed of the random numbers, which are the same at each validation.
        tokenizer: A tokenizer.json, or its folder. By default the tokenizer of the data.

    Raises:
        UserError: A number is out of its range, or the file of prompts cannot be read. When
            training starts: the data have no tokenizer or no text.
    """

    changes_learning = False

    def __init__(
        self,
        prompts: list[str] | str | None = None,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        require_positive(self, max_tokens=max_tokens)
        self.prompts = read_prompts(prompts)
        self.max_tokens = max_tokens
        self.sampling = Sampling(temperature, top_k, top_p, seed)
        self.tokenizer = tokenizer
        self._session: _Session | None = None
        """Prompts and tokenizer of the current training."""
        self._unwritten: list[str] = []
        """Lines that are not in the file because the disk is full. A checkpoint keeps them."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the lines to those of other `Samples`; a state would allow one in a run."""
        if self._unwritten:
            checkpoint[UNWRITTEN] = checkpoint.get(UNWRITTEN, []) + self._unwritten

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the lines; the first of several `Samples` writes them for all."""
        self._unwritten = checkpoint.pop(UNWRITTEN, [])

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Encode the prompts; UserError if there will be no text."""
        data = data_module_of(trainer)
        if self.prompts is None and not hasattr(data, "stores"):
            raise UserError("Samples needs prompts for data of your own: set its prompts")
        self._session = _Session(self.prompts, self.tokenizer, trainer, pl_module)

    @rank_zero_only
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remove the lines of steps that the run takes again, and a line that a kill cut off.

        Add the lines for which the disk had no space.
        """
        file = _file(trainer)
        if trainer.fast_dev_run:
            return
        lines = []
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        earlier_lines = [line for line in lines if _step(line) < trainer.global_step]
        earlier_lines += [line for line in self._unwritten if line not in earlier_lines]
        if earlier_lines != lines:
            write_text(file, "".join(earlier_lines))
        self._unwritten = []

    def on_validation_batch_start(
        self,
        trainer: Any,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sample before the first batch: callbacks such as WeightAveraging have set the weights."""
        is_first_batch = batch_idx == 0 and dataloader_idx == 0
        if trainer.state.fn != "fit" or trainer.sanity_checking or not is_first_batch:
            return
        if not trainer.is_global_zero and not isinstance(pl_module.model, FSDPModule):
            return
        assert self._session is not None  # from on_fit_start
        with trainer.precision_plugin.forward_context(), uncompiled(pl_module.model):
            texts = self._session.continue_prompts(self.max_tokens, self.sampling)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            note = partial(end_after_log_error, trainer)
            call_noting_errors(note, self._log, trainer, self._session.prompts, texts)

    def _log(self, trainer: L.Trainer, prompts: list[str], texts: list[str]) -> None:
        """Write the samples to the loggers that show text, and to the file."""
        step = trainer.global_step - 1  # the step of val/loss in the logs
        tokens = _training_tokens(trainer)
        rows: list[Any] = []
        for prompt, text in zip(prompts, texts, strict=True):
            row = [step, tokens, prompt, text]
            rows.append(row)
            self._unwritten.append(json_line(dict(zip(COLUMNS, row, strict=True))) + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_text("samples", COLUMNS, rows, step=step)
            elif isinstance(logger, TensorBoardLogger):
                for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                    markdown = f"**prompt**\n\n{_as_block(prompt)}\n\n**text**\n\n{_as_block(text)}"
                    logger.experiment.add_text(f"samples/{number}", markdown, step)
        file = _file(trainer)
        file.parent.mkdir(parents=True, exist_ok=True)
        with appending(file) as stream:
            stream.write("".join(self._unwritten))
        self._unwritten = []


def read_prompts(prompts: list[str] | str | None) -> list[str] | None:
    """The prompts of a list or a file; UserError if there is none."""
    if prompts is None:
        return None
    if isinstance(prompts, str):
        if not Path(prompts).is_file():
            raise UserError(
                f"Samples has prompts={prompts}, which is not a file: give a file or a list of "
                "texts"
            )
        prompts = [prompt for prompt, _ in read_documents([prompts], "prompt")]
    if not prompts:
        raise UserError(
            "Samples has no prompt: give one, or leave prompts out for the beginnings of documents"
        )
    return prompts


def document_beginnings(data: Any, tokenizer: Tokenizer) -> list[str]:
    """The first words of up to four documents of the validation split, from each array in turn.

    Documents that begin alike count once. Raises UserError if the split has no text.
    """
    beginnings = []
    for store in data.stores("val"):
        documents = _first_documents(store, data.manifest)
        beginnings.append(_decode_beginnings(tokenizer, documents))
    in_turn = chain.from_iterable(zip_longest(*beginnings))
    prompts = list(dict.fromkeys(filter(None, in_turn)))[:N_DOCUMENTS]
    if not prompts:
        raise UserError(f"{data.path}/val has no text to begin samples with: set Samples' prompts")
    return prompts


def _first_documents(store: TokenStore, manifest: Mapping[str, Any]) -> list[np.ndarray]:
    """The tokens of the documents at the beginning of an array, with their separators."""
    tokens = store.read(0, min(store.n_tokens, SEARCHED_TOKENS))
    ids = document_ids(tokens[None], manifest["end_of_document"], manifest["document_token_at"])[0]
    return np.split(tokens, np.flatnonzero(np.diff(ids)) + 1)


def _decode_beginnings(tokenizer: Tokenizer, documents: Iterable[np.ndarray]) -> Iterator[str]:
    """Yield the first words of each document that has any."""
    for tokens in documents:
        text = tokenizer.decode(tokens[:N_FIRST_TOKENS].tolist(), skip_special_tokens=True)
        text = text.rstrip(REPLACEMENT)  # a character that was cut in two
        if text.strip():
            yield text


class _Session:
    """The prompts of a training, encoded for its model.

    Args:
        prompts: Texts; None for the beginnings of documents.
        tokenizer: The path of a tokenizer; None for the tokenizer of the data.
    """

    def __init__(
        self, prompts: list[str] | None, tokenizer: str | None, trainer: L.Trainer, model: Any
    ) -> None:
        data = data_module_of(trainer)
        # The checkpoint that the run will write, for functions that load a checkpoint's tokenizer.
        self.checkpoint = Checkpoint(
            model=model,
            file=Path(trainer.default_root_dir) / CHECKPOINTS / LAST,
            step=trainer.global_step,
            config=None,
            trained_on=fingerprint_of(data),
            settings={},
            family=model.family,
        )
        self.tokenizer: CheckpointTokenizer = self._load_tokenizer(tokenizer, data)
        if prompts is None:
            prompts = document_beginnings(data, self.tokenizer.tokenizer)
        self.prompts = prompts
        self.requests = []
        for prompt in prompts:
            tokens = self.tokenizer.encode_prompt(prompt)
            self.requests.append(Request(tokens))

    def _load_tokenizer(self, tokenizer: str | None, data: Any) -> CheckpointTokenizer:
        if tokenizer is None and isinstance(data, TokenShards):
            tokenizer = data.folders[0]
        if tokenizer is not None:
            try:
                return load_checkpoint_tokenizer(self.checkpoint, tokenizer)
            except UserError as error:
                # The option of the commands that load checkpoints is a setting here.
                cause = str(error).replace("--tokenizer", "the tokenizer of Samples")
                raise UserError(cause) from error
        content = tokenizer_content_of(data)
        if content is None:
            raise UserError(
                f"Samples needs a tokenizer, which {name_of(data)} does not give: set the "
                "tokenizer of Samples, or give the class the attribute tokenizer"
            )
        return checkpoint_tokenizer(self.checkpoint, content, f"{name_of(data)}.tokenizer")

    def continue_prompts(self, max_tokens: int, sampling: Sampling) -> list[str]:
        """The text that follows each prompt, as `anlit generate` prints it."""
        continuations = continue_requests(self.tokenizer, self.requests, max_tokens, sampling)
        tokenizer = self.tokenizer.tokenizer
        texts = []
        for request, continuation in zip(self.requests, continuations, strict=True):
            texts.append(decode_continuation(tokenizer, request.prompt, continuation.tokens))
        return texts


def _file(trainer: L.Trainer) -> Path:
    return Path(trainer.default_root_dir) / SAMPLES


def _step(line: str) -> float:
    """The step of a line of `SAMPLES`; infinite for a line that is not complete."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, TypeError, KeyError):
        return float("inf")


def _training_tokens(trainer: L.Trainer) -> int | None:
    """The training tokens so far, in `train/tokens` of the logs; None without `Throughput`."""
    for throughput in callbacks_of_class(trainer, Throughput):
        return throughput.tokens
    return None


def _as_block(text: str) -> str:
    """A text as a block of code in Markdown, which shows each character as it is."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
