"""How a trained model's attention spreads its weights."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from anlit.attention.observation import bin_edges, observed
from anlit.attention.statistics import ranges
from anlit.checkpoints.loading import Checkpoint
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import available_targets, spread
from anlit.targets import IGNORED
from anlit.training.callbacks.dynamics import copying

# Tokens in a batch: enough short sequences for efficient matrix products.
BATCH_TOKENS = 4096
# Sequences of random tokens and their copy.
COPIES = 16


def diagnose(
    checkpoint: Checkpoint, data: TokenShards, lengths: list[int], tokens: int, masked: bool | None
) -> dict[str, Any]:
    """The attention statistics of each layer and head on validation text, by context length.

    Args:
        checkpoint: The model; its document masking is set to `masked`.
        data: The data whose validation split is read, in sequences evenly spread over it.
        lengths: Numbers of tokens in a sequence, measured separately.
        tokens: Tokens to read at each length, rounded up to a complete sequence.
        masked: Whether tokens attend only within their document; None for the setting of the training.

    Returns:
        `masking`; `copying`, the loss in nats per token on random tokens (`first`) and on the same tokens once more
        (`second`); and, by length in `lengths`: `length`, `tokens` read, `edges` of the bins of n, `queries` in each,
        `statistics` as {name: [layer][head][bin]}, NaN if there was nothing to measure. `squared_average` is ‖Σ w v‖²
        over the mean ‖v‖².

    Raises:
        UserError: The validation split is shorter than a sequence.
    """
    model = checkpoint.model
    if masked is not None:
        model.model.document_masking = masked
    found = {length: _at_length(checkpoint, data, length, tokens) for length in lengths}
    with torch.no_grad():
        copied = copying(model, model.context_length, COPIES, checkpoint.device)
    losses = {name.removeprefix("copying/"): loss for name, loss in copied.items()}
    return {"masking": model.model.document_masking, "copying": losses, "lengths": found}


@torch.no_grad()
def _at_length(checkpoint: Checkpoint, data: TokenShards, length: int, tokens: int) -> dict[str, Any]:
    model, edges = checkpoint.model, bin_edges(length)
    read = 0
    with observed(model, edges, ranges(length - 1)) as layers:
        for batch in sequences(data, length, tokens):
            model(batch.tokens.to(checkpoint.device), batch.document_ids.to(checkpoint.device))
            read += batch.tokens.numel()
    if not read:
        raise UserError(
            f"{data.path}/val has no {length:,} tokens in a row: leave {length} out of --lengths, or set --data"
        )
    means = [layer.means() for layer in layers]
    return {
        "length": length,
        "tokens": read,
        "edges": edges,
        "queries": layers[0].counts()[0].long().tolist(),
        "statistics": {name: [layer[name].tolist() for layer in means] for name in means[0]},
    }


def sequences(data: TokenShards, length: int, tokens: int) -> Iterator[Batch]:
    """Complete sequences of `length` tokens, evenly spread over the validation split, with at least `tokens` tokens if
    the split has them."""
    data.context_length = length
    if available_targets(data) < length:
        return
    spread(data, length, math.ceil(tokens / length) * length, BATCH_TOKENS)
    for batch in data.val_dataloader():
        complete = batch.targets[:, -1] != IGNORED
        if complete.any():
            yield batch._replace(tokens=batch.tokens[complete], document_ids=batch.document_ids[complete])
