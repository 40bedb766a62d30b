"""`anlit lengths`: the loss at and beyond the training length, always on the same tokens.

A position counts from 0 in its sequence or document. So the token after position p is predicted
from p + 1 tokens. Range 0 is position 0, range k ≥ 1 the positions [2^(k−1), 2^k).
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.compare.statistics import Summary
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import set_validation_pieces
from anlit.evaluation.lengths_report import measurements_of_arm, report_lengths
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import MAX_DEFAULT_TOKENS, LengthsSettings
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.models.runtime import allow_compiled_kernels, enough_memory
from anlit.reporting.text import say
from anlit.training.load_model import Checkpoint

Floats = NDArray[np.float64]
MAX_LOGITS_AT_ONCE = 1 << 26
"""Numbers; 256 MiB in float32."""


class LossSums(NamedTuple):
    """Sums of losses: (sequences or pieces, ranges of positions), or (pieces,) over all ranges."""

    losses: Floats
    """Summed loss in nats."""
    counts: Floats
    """Number of targets that count."""

    def by_piece(self, sequences_per_piece: int) -> "LossSums":
        """Add up the adjacent sequences that make a piece; (pieces, ranges)."""
        n_ranges = self.losses.shape[1]
        shape = (-1, sequences_per_piece, n_ranges)
        losses = self.losses.reshape(shape).sum(1)
        counts = self.counts.reshape(shape).sum(1)
        return LossSums(losses, counts)

    def n_sequences(self) -> int:
        """The number of rows with a target that counts."""
        return int((self.counts.sum(1) > 0).sum())

    def over_ranges(self) -> "LossSums":
        """Add up the ranges of positions; (sequences or pieces,)."""
        return LossSums(self.losses.sum(1), self.counts.sum(1))


class Lengths(Evaluation):
    """The loss at and beyond the training length, and by position."""

    name = page = "lengths"
    settings: LengthsSettings
    n_available: int
    """Targets in the validation split."""
    piece_length: int
    """Targets in a piece: the least common multiple of the lengths."""
    n_tokens: int
    """Targets to measure, a multiple of `piece_length`."""

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """Choose the lengths and the number of targets; UserError if there are too few targets."""
        plan = super().plan(checkpoints, data)
        n_requested = self.settings.tokens
        self.n_available = data.n_targets("val")
        self.piece_length = math.lcm(*self.lengths)
        lengths = ",".join(map(str, self.lengths))
        minimum = f"{self.piece_length:,}, the least common multiple of --lengths {lengths}"
        if self.n_available < self.piece_length:
            raise UserError(
                f"{data.path}/val has {self.n_available:,} tokens to predict and this needs "
                f"{minimum}: set shorter ones, or --data to a folder with a longer validation split"
            )
        if n_requested is not None and n_requested < self.piece_length:
            raise UserError(f"--tokens is {n_requested:,} and must be at least {minimum}: raise it")
        n_wanted = n_requested or max(MAX_DEFAULT_TOKENS, self.piece_length)
        n_pieces = min(n_wanted, self.n_available) // self.piece_length
        self.n_tokens = n_pieces * self.piece_length
        return plan | {"tokens": self.n_tokens}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        """Measure the loss at every length, with and without document masking.

        All read the same pieces of text, evenly spread over the split. A piece is as long as the
        least common multiple of the lengths.

        Returns:
            For each masking and length: {length, masking, total, change, by_position, sequences,
            bits_per_byte}. `change` is the loss minus the loss at the training length, with the
            standard error over pieces. It is None if not measured. `by_position` has {first, end,
            estimate} for the positions [first, end). Losses have the form of `estimate_loss`.

        Raises:
            UserError: A batch does not fit into memory.
        """
        bytes_per_token = data.bytes_per_token()  # before the split is limited to pieces
        set_validation_pieces(data, self.piece_length, self.n_tokens, self.settings.batch_tokens)
        measurements: list[dict[str, Any]] = []
        decoder = checkpoint.model.model
        trained_masking = decoder.document_masking
        for masked in sorted(self.settings.masking, reverse=True):
            decoder.document_masking = masked
            sums_by_length = {}
            sums_by_piece = {}
            for length in self.lengths:
                sums = self._sum_losses(checkpoint, data, length, masked)
                sums_by_length[length] = sums
                sums_by_piece[length] = sums.by_piece(self.piece_length // length)
            reference = sums_by_piece.get(checkpoint.training_length)
            for length, piece_sums in sums_by_piece.items():
                change = None
                if reference is not None and length != checkpoint.training_length:
                    totals = reference.over_ranges()
                    difference = piece_sums.over_ranges().losses - totals.losses
                    change = estimate_loss(difference, totals.counts)
                measurements.append({
                    "length": length,
                    "masking": masked,
                    "change": change,
                    "sequences": sums_by_length[length].n_sequences(),
                    **_summarise(piece_sums, length, bytes_per_token),
                })  # fmt: skip
        decoder.document_masking = trained_masking
        return measurements

    def _sum_losses(
        self, checkpoint: Checkpoint, data: TokenShards, length: int, masked: bool
    ) -> LossSums:
        """Evaluate the pieces in sequences of `length` tokens and print the mean loss."""
        allow_compiled_kernels(checkpoint.model.model, self.n_tokens, length)
        n_rows = max(1, self.settings.batch_tokens // length)
        batches = _cut_into_sequences(data, length, n_rows)
        sums = sum_by_range(checkpoint, batches, length, masked)
        mean = sums.losses.sum() / sums.counts.sum()
        masking = "masked" if masked else "not masked"
        say(f"{checkpoint.file}: {mean:.4f} at {length:,}, documents {masking}")
        return sums

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        arms, notes = group_by_seed(checkpoints)
        record: dict[str, Any] = {"arms": arms, "measurements": measurements, "notes": notes}
        for arm in arms:
            arm["loss"] = []
            for masked, length in product(self.settings.masking, self.lengths):
                seeds = measurements_of_arm(record, arm, length, masked)
                loss = Summary(tuple(seed["total"]["loss"] for seed in seeds))
                arm["loss"].append(
                    {"length": length, "masking": masked, "mean": loss.mean, "sd": loss.sd}
                )
        if self.settings.tokens not in (None, self.n_tokens):
            notes.append(
                f"Evaluated on {self.n_tokens:,} tokens and not {self.settings.tokens:,}: "
                "the number must be a multiple of every length, and the validation split has "
                f"{self.n_available:,}."
            )
        trained_here = [checkpoint for checkpoint in checkpoints if checkpoint.is_trained_here]
        maskings = {checkpoint.model.model.document_masking for checkpoint in trained_here}
        if maskings and maskings != set(self.settings.masking):
            descending = sorted(maskings, reverse=True)
            modes = " and ".join("with" if masked else "without" for masked in descending)
            notes.append(f"The models were trained {modes} document masking.")
        return record

    def report(self, record: dict[str, Any]) -> Report:
        return report_lengths(record)


def _summarise(sums: LossSums, length: int, bytes_per_token: float | None) -> dict[str, Any]:
    """Total loss, loss by position and bits per byte at a length, from sums by piece.

    The standard errors are over pieces at every length. Pieces are what is drawn from the split.
    Sequences of one piece are neighbours in a text, so their losses are alike.
    """
    total = estimate_loss(*sums.over_ranges())
    bits_per_byte = None
    if bytes_per_token and total["tokens"]:
        bits_per_byte = total["loss"] / math.log(2) / bytes_per_token
    by_position = []
    for k in range(sums.losses.shape[1]):
        loss = estimate_loss(sums.losses[:, k], sums.counts[:, k])
        by_position.append({"first": 1 << k >> 1, "end": min(1 << k, length), "estimate": loss})
    return {
        "total": total,
        "by_position": by_position,
        "bits_per_byte": bits_per_byte,
    }


def estimate_loss(losses: Floats, tokens: Floats) -> dict[str, Any]:
    """Estimate the loss per token from sums over pieces of text, (pieces,) each.

    Pieces without targets do not count.

    Returns:
        {loss, standard_error, tokens}. `loss` is in nats per token, None without tokens.
        `standard_error` is over pieces, the sampled units of the corpus; None for fewer than two.
        `tokens` is the number of targets.
    """
    losses = losses[tokens > 0]
    tokens = tokens[tokens > 0]
    n = len(tokens)
    if n == 0:
        return {"loss": None, "standard_error": None, "tokens": 0}
    n_tokens = float(tokens.sum())
    mean = float(losses.sum()) / n_tokens
    squares = float(np.square(losses - mean * tokens).sum())
    error = math.sqrt(n / (n - 1) * squares) / n_tokens if n > 1 else None
    return {"loss": mean, "standard_error": error, "tokens": int(n_tokens)}


def _cut_into_sequences(data: TokenShards, length: int, n_rows: int) -> Iterator[Batch]:
    """Cut the pieces of the validation data into batches of `n_rows` sequences of `length`."""
    for pieces in data.val_dataloader():
        yield from pieces.split(length).in_rows(n_rows)


def sum_by_range(
    checkpoint: Checkpoint, batches: Iterator[Batch], length: int, masked: bool
) -> LossSums:
    """Sum losses and targets by range of positions; UserError if a batch exceeds the memory."""
    n_ranges = (length - 1).bit_length() + 1
    advice = "set --batch_tokens to less, or --lengths to shorter ones"
    loss_sums: list[np.ndarray] = []
    count_sums: list[np.ndarray] = []
    for batch in batches:
        with enough_memory(len(batch.tokens), length, checkpoint.device, advice):
            losses = token_losses(checkpoint.model, batch).cpu().double().numpy()
        positions = np.broadcast_to(np.arange(length), losses.shape)
        if masked:
            positions = batch.positions.numpy()
        # frexp's exponent is 0 for position 0, else ⌊log2 p⌋ + 1.
        ranges = np.frexp(positions.astype(np.float64))[1]
        n_rows = len(losses)
        bins = (np.arange(n_rows)[:, None] * n_ranges + ranges).ravel()
        is_counted = (batch.targets != IGNORE_INDEX).numpy().ravel().astype(np.float64)
        batch_losses = np.bincount(bins, losses.ravel(), n_rows * n_ranges)
        batch_counts = np.bincount(bins, is_counted, n_rows * n_ranges)
        loss_sums.append(batch_losses.reshape(-1, n_ranges))
        count_sums.append(batch_counts.reshape(-1, n_ranges))
    return LossSums(np.concatenate(loss_sums), np.concatenate(count_sums))


@torch.inference_mode()
def token_losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of every target in nats, (B, T); 0 if it does not count.

    The logits of many thousands of tokens, (B, T, V), would not fit into memory. So they are
    computed for a few rows at a time.
    """
    decoder = model.model
    device = next(model.parameters()).device
    decoder.logits = _identity  # the decoder returns hidden states
    try:
        hidden = decoder(batch.tokens.to(device), batch.document_ids.to(device)).flatten(0, 1)
    finally:
        del decoder.logits
    targets = batch.targets.to(device).flatten()
    n_rows = max(1, MAX_LOGITS_AT_ONCE // model.vocab_size)
    losses = []
    for hidden_rows, target_rows in zip(hidden.split(n_rows), targets.split(n_rows), strict=True):
        logits = decoder.logits(hidden_rows).float()
        losses.append(
            cross_entropy(logits, target_rows, ignore_index=IGNORE_INDEX, reduction="none")
        )
    return torch.cat(losses).view(batch.targets.shape)


def _identity(h: Tensor) -> Tensor:
    return h
