"""Checks of a DataModule's settings against its data and its model. Each raises UserError."""

import math
from collections.abc import Mapping, Sequence

from anlit.data.storage.shards import TokenArray
from anlit.errors import UserError

VOCABULARY_MULTIPLE = 128
"""A model may round its vocabulary up to a multiple of this number, for faster kernels."""


def padded_vocabulary(size: int) -> int:
    """Return the vocabulary size that a model has by default for `size` tokens."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def check_vocabulary(model_size: int | None, data_size: int, owner: str) -> None:
    """Check that the model's vocabulary is the data's, possibly padded. None: no model.

    `owner` is `the shards in data/fw have` or the like, for the message.
    """
    if model_size is not None and not data_size <= model_size <= padded_vocabulary(data_size):
        raise UserError(
            f"the model has a vocabulary of {model_size} tokens and {owner} "
            f"{data_size}: set --model.vocab_size {data_size} or leave it out, in Python "
            f"vocab_size={data_size}"
        )


def check_context_schedule(schedule: Mapping[int, int] | None, context_length: int) -> None:
    """Check that the schedule begins at step 0, and that its lengths divide the context length.

    Its last length has to be the context length.
    """
    if schedule is None:
        return
    name = f"--data.context_schedule {dict(schedule)}"
    if min(schedule, default=-1) != 0:
        raise UserError(
            f"{name} does not begin at step 0: give the length for 0, and for no earlier step"
        )
    for step, length in schedule.items():
        if length < 1 or context_length % length:
            raise UserError(
                f"{name} has length {length} at step {step}, which does not divide the context "
                f"length {context_length}: give a divisor"
            )
    last_length = schedule[max(schedule)]
    if last_length != context_length:
        raise UserError(
            f"{name} ends with {last_length} and the context length is {context_length}: end it "
            f"with {context_length}, or set --model.context_length {last_length}"
        )


def check_weights(weights: Mapping[str, float] | None, names: Sequence[str], path: str) -> None:
    """Check that every weight belongs to a name and is not negative, and that some are positive."""
    if weights is None:
        return
    if list(names) == [""]:
        raise UserError(f"--data.weights is set and {path} has no subsets: leave it out")
    listed = ", ".join(names)
    if unknown := [name for name in weights if name not in names]:
        raise UserError(
            f"--data.weights has {', '.join(unknown)} and {path} has {listed}: choose among these"
        )
    if invalid := [name for name, weight in weights.items() if not 0 <= weight < math.inf]:
        raise UserError(
            f"--data.weights of {', '.join(invalid)} is not a number from 0 up: set it to 0 or more"
        )
    if not any(weights.values()):
        raise UserError(f"--data.weights are all 0: give a positive weight to one of {listed}")


def check_enough_to_train(
    arrays_by_name: Mapping[str, Sequence[TokenArray]],
    batch_size: int,
    devices: int,
    length: int,
    path: str,
) -> None:
    """Check that each name has a sequence of `length` tokens, and all together a global batch."""
    total = 0
    for name, arrays in arrays_by_name.items():
        n_sequences = sum(max(0, array.n_tokens - 1) // length for array in arrays)
        total += n_sequences
        if n_sequences == 0:
            longest = max(array.n_tokens for array in arrays)
            folder = f"{path}/train/{name}".rstrip("/")
            raise UserError(
                f"context_length {length} is too long for {folder}, which has {longest:,} tokens: "
                f"set --model.context_length to {max(1, longest - 1)} or less"
            )
    needed = batch_size * devices
    if total < needed:
        raise UserError(
            f"batch_size {batch_size} on each of {devices} device(s) needs {needed:,} sequences "
            f"and {path}/train has {total:,} of {length} tokens: set a smaller --data.batch_size "
            "or a shorter context_length"
        )
