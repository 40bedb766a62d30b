"""Settings of a DataModule that do not fit its data, its model or each other: each check raises UserError."""

from collections.abc import Mapping, Sequence

from anlit.data.storage.shards import Source
from anlit.errors import UserError

VOCABULARY_PADDING = (
    128  # a model's vocabulary may be rounded up to a multiple of this, for faster kernels
)


def padded_vocabulary(size: int) -> int:
    """The size that a model has for a vocabulary of `size` tokens, where the user says none."""
    return -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING


def check_vocabulary(model_size: int | None, shards_size: int, path: str) -> None:
    """The model's vocabulary is the shards', or that rounded up; None: there is no model."""
    if model_size is not None and not shards_size <= model_size <= padded_vocabulary(shards_size):
        raise UserError(
            f"The model has a vocabulary of {model_size} tokens and the shards in {path} have "
            f"{shards_size}: set --model.vocab_size {shards_size}, or leave it out."
        )


def check_context_schedule(schedule: Mapping[int, int] | None, context_length: int) -> None:
    """The schedule begins at step 0, its lengths divide the last, and that is the context's."""
    if schedule is None:
        return
    name, last = (
        f"--data.context_schedule {dict(schedule)}",
        schedule[max(schedule)] if schedule else 0,
    )
    if min(schedule, default=-1) != 0:
        raise UserError(
            f"{name} does not begin at step 0: give the length for 0, and for no step before it."
        )
    for step, length in schedule.items():
        if length < 1 or context_length % length:
            raise UserError(
                f"{name} has length {length} at step {step}, which does not divide the context length "
                f"{context_length}: give one that does."
            )
    if last != context_length:
        raise UserError(
            f"{name} ends with {last} and the context length is {context_length}: end it with {context_length}, or set "
            f"--model.context_length {last}."
        )


def check_weights(weights: Mapping[str, float] | None, names: Sequence[str], path: str) -> None:
    """Every weight belongs to a name, none is negative and one is positive."""
    if weights is None:
        return
    if list(names) == [""]:
        raise UserError(f"--data.weights is given and {path} has no subsets: leave it out.")
    listed = ", ".join(names)
    if unknown := [name for name in weights if name not in names]:
        raise UserError(
            f"--data.weights has {', '.join(unknown)} and {path} has {listed}: choose among these."
        )
    if negative := [name for name, weight in weights.items() if not 0 <= weight < float("inf")]:
        raise UserError(
            f"--data.weights of {', '.join(negative)} is not a number from 0 up: set it to one."
        )
    if not any(weights.values()):
        raise UserError(f"--data.weights are all 0: give at least one of {listed} a positive one.")


def check_enough_to_train(
    drawn: Mapping[str, Sequence[Source]], batch_size: int, devices: int, length: int, path: str
) -> None:
    """Of each name in `drawn` one source has a sequence of `length` tokens, and all have a batch for every device."""
    counts = {
        name: sum(max(0, s.n_tokens - 1) // length for s in sources)
        for name, sources in drawn.items()
    }
    for name in (name for name, count in counts.items() if count == 0):
        longest, where = (
            max(source.n_tokens for source in drawn[name]),
            f"{path}/train/{name}".rstrip("/"),
        )
        raise UserError(
            f"context_length {length} is too long for {where}, which has {longest:,} tokens: set "
            f"--model.context_length to {max(1, longest - 1)} or less."
        )
    if (total := sum(counts.values())) < (needed := batch_size * devices):
        raise UserError(
            f"batch_size {batch_size} on each of {devices} device(s) needs {needed:,} sequences and {path}/train has "
            f"{total:,} of {length} tokens: set a smaller --data.batch_size or a shorter context_length."
        )
