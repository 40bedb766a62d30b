"""A model's loss on the same tokens, cut into sequences of several lengths."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.checkpoints.loading import Checkpoint
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import spread
from anlit.evaluation.lengths.tally import Estimate, Floats, RangeLoss, Tally, estimate
from anlit.targets import IGNORED

LOGITS_AT_ONCE = 1 << 26  # numbers; 256 MiB in float32


@dataclass(frozen=True, eq=False)
class Measurement:
    """One checkpoint at one length, with documents masked or not."""

    length: int
    masking: bool
    total: Estimate
    change: Estimate | None
    """The loss minus that at the training length, with the standard error over pieces as long as the lengths' least
    common multiple; None at the training length, or if that was not measured."""
    by_position: list[RangeLoss]
    """By the number of earlier tokens that the model sees: those of the document with masking, else of the sequence."""
    sequences: int
    bits_per_byte: float | None


def measure(
    checkpoint: Checkpoint,
    data: TokenShards,
    lengths: list[int],
    masking: list[bool],
    tokens: int,
    batch_tokens: int,
    tell: Callable[[Measurement], None] = lambda _: None,
) -> list[Measurement]:
    """The checkpoint's loss at every length, with and without document masking.

    All lengths use the same pieces of text, which are as long as their least common multiple and evenly spread over the
    split.

    Args:
        lengths: Tokens per sequence.
        masking: Values of `document_masking` to measure with.
        tokens: Targets to measure on, a multiple of every length; fewer if one of several folders ends within a piece.
        batch_tokens: Tokens in a batch, which has at least one sequence.

    Raises:
        UserError: A batch does not fit into memory.
    """
    decoder = checkpoint.model.model
    trained_with = decoder.document_masking
    found = []
    piece = math.lcm(*lengths)
    spread(data, piece, tokens, batch_tokens)
    for masked in masking:
        decoder.document_masking = masked
        sums: dict[int, tuple[Floats, Floats]] = {}
        # The training length comes first, because the others are compared with it.
        for length in sorted(lengths, key=lambda n: (n != checkpoint.training_length, n)):
            batches = _batches(data, length, batch_tokens)
            one, tally = _at_length(checkpoint, batches, length, masked, data.bytes_per_token())
            sums[length] = _pieces(tally, piece)
            if length != checkpoint.training_length and checkpoint.training_length in sums:
                reference, n = sums[checkpoint.training_length]
                one = replace(one, change=estimate(sums[length][0] - reference, n))
            found.append(one)
            tell(one)
    decoder.document_masking = trained_with
    return sorted(found, key=lambda one: (not one.masking, one.length))


def _batches(data: TokenShards, length: int, batch_tokens: int) -> Iterator[Batch]:
    """The pieces, cut into sequences of `length`."""
    rows = max(1, batch_tokens // length)
    for pieces in data.val_dataloader():
        cut = pieces.cut(length)
        for first in range(0, len(cut.tokens), rows):
            part = slice(first, first + rows)
            yield cut._replace(
                tokens=cut.tokens[part],
                targets=cut.targets[part],
                document_ids=cut.document_ids[part],
                positions=cut.positions[part],
            )


def _at_length(
    checkpoint: Checkpoint, batches: Iterator[Batch], length: int, masked: bool, bytes_per_token: float | None
) -> tuple[Measurement, Tally]:
    tally, in_sequence = Tally(length), np.arange(length)
    for batch in batches:
        try:
            losses = token_losses(checkpoint.model, batch).cpu().double().numpy()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"A batch of {len(batch.tokens)} × {length} tokens does not fit into the memory of "
                f"{checkpoint.device}: set --batch_tokens to less, or --lengths to shorter ones"
            ) from error
        counted = (batch.targets != IGNORED).numpy()
        tally.add(losses, counted, batch.positions.numpy() if masked else np.broadcast_to(in_sequence, losses.shape))
    total = estimate(tally.losses.sum(1), tally.tokens.sum(1))
    bits = total.loss / math.log(2) / bytes_per_token if bytes_per_token and total.loss is not None else None
    measurement = Measurement(
        length=length,
        masking=masked,
        total=total,
        change=None,
        by_position=tally.ranges(),
        sequences=int((tally.tokens.sum(1) > 0).sum()),
        bits_per_byte=bits,
    )
    return measurement, tally


@torch.inference_mode()
def token_losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy in nats of every target, (B, T), 0 if it does not count. Logits are computed in parts."""
    decoder, device = model.model, next(model.parameters()).device
    decoder.logits = lambda h: h  # those of many thousands of tokens, (B, T, V), would not fit into memory
    try:
        hidden = decoder(batch.tokens.to(device), batch.document_ids.to(device)).flatten(0, 1)
    finally:
        del decoder.logits
    targets = batch.targets.to(device).flatten()
    rows = max(1, LOGITS_AT_ONCE // model.vocab_size)
    losses = [
        cross_entropy(decoder.logits(h).float(), target, ignore_index=IGNORED, reduction="none")
        for h, target in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses).view(batch.targets.shape)


def _pieces(tally: Tally, length: int) -> tuple[Floats, Floats]:
    """Summed loss and counted targets of each piece of `length` tokens, which do not depend on the sequence length."""
    each = length // tally.length
    return tally.losses.sum(1).reshape(-1, each).sum(1), tally.tokens.sum(1).reshape(-1, each).sum(1)
