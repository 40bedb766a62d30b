"""A model's loss on the same tokens, cut into sequences of several lengths.

A position counts from 0 in its sequence or document, so the token after position p is predicted from p + 1 tokens.
Range 0 is position 0, range k ≥ 1 the positions [2^(k−1), 2^k).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.checkpoints.loading import Checkpoint
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import spread
from anlit.targets import IGNORED

Floats = NDArray[np.float64]
PER_SEQUENCE = ("tokens", "targets", "document_ids", "positions")
"""The fields of a batch with a row for each sequence."""
LOGITS_AT_ONCE = 1 << 26  # numbers; 256 MiB in float32


def measure(
    checkpoint: Checkpoint,
    data: TokenShards,
    lengths: list[int],
    masking: list[bool],
    tokens: int,
    batch_tokens: int,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """The checkpoint's loss at every length, with and without document masking.

    All lengths use the same pieces of text, which are as long as their least common multiple and evenly spread over the
    split.

    Args:
        lengths: Tokens per sequence.
        masking: Values of `document_masking` to measure with.
        tokens: Targets to measure on, a multiple of every length; fewer if one of several folders ends within a piece.
        batch_tokens: Tokens in a batch, which has at least one sequence.
        tell: Called with each measurement.

    Returns:
        For each masking and length: {length, masking, total, change, by_position, sequences, bits_per_byte}. `total`,
        `change` and each range's `estimate` are as `estimate` gives them. `change` is the loss minus that at the
        training length, with the standard error over pieces; None at the training length, or if that was not measured.
        `by_position` has {first, end, estimate} for the positions [first, end): the number of earlier tokens that the
        model sees, those of the document with masking, else of the sequence.

    Raises:
        UserError: A batch does not fit into memory.
    """
    decoder, trained_length = checkpoint.model.model, checkpoint.training_length
    trained_with = decoder.document_masking
    measurements = []
    piece = math.lcm(*lengths)
    spread(data, piece, tokens, batch_tokens)
    for masked in masking:
        decoder.document_masking = masked
        pieces: dict[int, list[Floats]] = {}
        # The training length comes first, because the others are compared with it.
        for length in sorted(lengths, key=lambda n: (n != trained_length, n)):
            losses, counts = sums_by_range(checkpoint, _batches(data, length, batch_tokens), length, masked)
            # Sums over a piece do not depend on the length of its sequences.
            pieces[length] = [each.sum(1).reshape(-1, piece // length).sum(1) for each in (losses, counts)]
            change = None
            if length != trained_length and trained_length in pieces:
                reference, n = pieces[trained_length]
                change = estimate(pieces[length][0] - reference, n)
            own = {"length": length, "masking": masked, "change": change}
            measurements.append(own | _means(losses, counts, length, data.bytes_per_token()))
            tell(measurements[-1])
    decoder.document_masking = trained_with
    return sorted(measurements, key=lambda own: (not own["masking"], own["length"]))


def _means(losses: Floats, counts: Floats, length: int, bytes_per_token: float | None) -> dict[str, Any]:
    """The means of a measurement, from summed losses and counted targets, (sequences, ranges) each."""
    total = estimate(losses.sum(1), counts.sum(1))
    bounds = [(0, 1), *((2 ** (k - 1), min(2**k, length)) for k in range(1, losses.shape[1]))]
    return {
        "total": total,
        "by_position": [
            {"first": first, "end": end, "estimate": estimate(losses[:, k], counts[:, k])}
            for k, (first, end) in enumerate(bounds)
        ],
        "sequences": int((counts.sum(1) > 0).sum()),
        "bits_per_byte": total["loss"] / math.log(2) / bytes_per_token if bytes_per_token and total["tokens"] else None,
    }


def estimate(losses: Floats, tokens: Floats) -> dict[str, Any]:
    """Ratio of summed loss to counted targets, with the standard error over the sequences that have targets.

    Args:
        losses: (sequences,) summed losses in nats.
        tokens: (sequences,) counted targets.

    Returns:
        {loss, standard_error, tokens}: nats per counted token, None without tokens; its standard error over sequences,
        the units in which the corpus was sampled, None for fewer than two; the number of tokens.
    """
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    n, total = len(tokens), float(tokens.sum())
    if n == 0:
        return {"loss": None, "standard_error": None, "tokens": 0}
    mean = float(losses.sum()) / total
    squares = float(np.square(losses - mean * tokens).sum())
    error = math.sqrt(n / (n - 1) * squares) / total if n > 1 else None
    return {"loss": mean, "standard_error": error, "tokens": int(total)}


def sums_by_range(checkpoint: Checkpoint, batches: Iterator[Batch], length: int, masked: bool) -> tuple[Floats, Floats]:
    """Summed losses and counted targets, (sequences, ranges) each.

    Raises:
        UserError: A batch does not fit into memory.
    """
    n_ranges = int(_range_of(np.array(length - 1))) + 1
    sums = []
    for batch in batches:
        try:
            losses = token_losses(checkpoint.model, batch).cpu().double().numpy()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"A batch of {len(batch.tokens)} × {length} tokens does not fit into the memory of "
                f"{checkpoint.device}: set --batch_tokens to less, or --lengths to shorter ones"
            ) from error
        counted = (batch.targets != IGNORED).numpy()
        ranges = _range_of(batch.positions.numpy() if masked else np.broadcast_to(np.arange(length), losses.shape))
        index = (np.arange(len(losses))[:, None] * n_ranges + ranges).ravel()
        sums.append([
            np.bincount(index, weights.ravel().astype(np.float64), len(losses) * n_ranges).reshape(-1, n_ranges)
            for weights in (np.where(counted, losses, 0.0), counted)
        ])  # fmt: skip
    losses, counts = (np.concatenate(parts) for parts in zip(*sums, strict=True))
    return losses, counts


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


def _batches(data: TokenShards, length: int, batch_tokens: int) -> Iterator[Batch]:
    """The pieces, cut into sequences of `length`."""
    rows = max(1, batch_tokens // length)
    for pieces in data.val_dataloader():
        cut = pieces.cut(length)
        for first in range(0, len(cut.tokens), rows):
            part = slice(first, first + rows)
            yield cut._replace(**{name: getattr(cut, name)[part] for name in PER_SEQUENCE})


def _range_of(positions: NDArray[Any]) -> NDArray[np.int64]:
    """0 for position 0, else ⌊log2 p⌋ + 1, the exponent of p as a floating-point number."""
    return np.frexp(positions.astype(np.float64))[1].astype(np.int64)
