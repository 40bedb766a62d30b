"""Makes a `Batch` of what other DataModules deliver: pairs, dictionaries of Hugging Face, batches.

Legend as in `batch.py`: B sequences in a micro-batch, T tokens in each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anlit.data.batch import IGNORE_INDEX, Batch, one_document_per_row
from anlit.errors import UserError

FORMS = "give (tokens, targets), a dictionary with input_ids and labels, or an anlit Batch"
KEYS = ("input_ids", "labels", "attention_mask")
"""The entries of a dictionary that are read. Any other entry is refused."""


def as_batch(value: Any, source: str, vocab_size: int) -> Batch:
    """Return the `Batch` of a batch in any accepted form, checked against the vocabulary.

    Each row is one document, unless the value is a `Batch`.

    Args:
        value: (tokens, targets), each (B, T) integers, a target −100 where it does not count. Or a
            mapping with `input_ids` and `labels`, (B, T), which are not shifted yet, as models of
            transformers take them. Or a `Batch`.
        source: What delivers the batches, for messages.
        vocab_size: Tokens that the model knows.

    Raises:
        UserError: The form, a shape, a dtype or a token is wrong.
    """
    if isinstance(value, Batch):
        batch = value
    else:
        tokens, targets = _tokens_and_targets(value, source)
        batch = one_document_per_row(tokens.long(), targets.long())
    _check_vocabulary("token", batch.tokens, source, vocab_size)
    targets = batch.targets.masked_fill(batch.targets == IGNORE_INDEX, 0)
    _check_vocabulary("target", targets, source, vocab_size)
    return batch


def _tokens_and_targets(value: Any, source: str) -> tuple[Tensor, Tensor]:
    if isinstance(value, Mapping):
        return _shift_labels(value, source)
    if isinstance(value, tuple | list) and len(value) == 2:
        tokens, targets = value
        _check_form("tokens", tokens, source)
        _check_form("targets", targets, source, tokens)
        return tokens, targets
    raise UserError(f"{source} delivers {_in_words(value)} as a batch: {FORMS}")


def _shift_labels(value: Mapping[str, Any], source: str) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a dictionary: the target of a position is the next label.

    The last position has no target. transformers shifts labels in the same way.
    """
    missing = [key for key in ("input_ids", "labels") if key not in value]
    if missing:
        raise UserError(f"{source} delivers a dictionary without {' and '.join(missing)}: {FORMS}")
    unknown = [str(key) for key in value if key not in KEYS]
    if unknown:
        raise UserError(
            f"{source} delivers a dictionary with {', '.join(unknown)}, and {', '.join(KEYS)} are "
            "read: leave it out, or give an anlit Batch, which has documents and positions"
        )
    tokens = value["input_ids"]
    labels = value["labels"]
    _check_form("input_ids", tokens, source)
    _check_form("labels", labels, source, tokens)
    mask = value.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise UserError(
            f"{source} delivers an attention_mask that hides tokens in front of others, which "
            "attention would see: pad on the right"
        )
    targets = torch.full_like(labels, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return tokens, targets


def _check_form(name: str, value: Any, source: str, tokens: Tensor | None = None) -> None:
    """Raise UserError unless a value has (B, T) integers, and the shape of `tokens` if given."""
    if not isinstance(value, Tensor):
        raise UserError(f"{source} delivers {_in_words(value)} as {name}: give a tensor")
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8):
        dtype = str(value.dtype).removeprefix("torch.")
        raise UserError(f"{source} delivers {name} in {dtype}: give integers, such as int64")
    if value.dim() != 2 or not value.numel():
        raise UserError(
            f"{source} delivers {name} of shape {tuple(value.shape)}: give (sequences, tokens)"
        )
    if tokens is not None and value.shape != tokens.shape:
        raise UserError(
            f"{source} delivers {name} of shape {tuple(value.shape)} with tokens of shape "
            f"{tuple(tokens.shape)}: give one for each token, -100 where it does not count"
        )


def _check_vocabulary(name: str, numbers: Tensor, source: str, vocab_size: int) -> None:
    """Raise UserError for a number outside of the vocabulary: a GPU would fail without a name."""
    if not numbers.numel():
        return
    for extreme in torch.aminmax(numbers):
        number = int(extreme)
        if not 0 <= number < vocab_size:
            raise UserError(
                f"{source} delivers the {name} {number}, and the model's vocabulary has "
                f"{vocab_size} tokens: set --model.vocab_size to the vocabulary of the data"
            )


def _in_words(value: Any) -> str:
    """Return the type of a value, with the length of a tuple or list."""
    name = type(value).__name__
    return f"a {name} of {len(value)}" if isinstance(value, tuple | list) else f"a {name}"
