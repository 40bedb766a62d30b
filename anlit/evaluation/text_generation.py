"""How the model of a checkpoint continues texts, in every command and callback that prints them."""

from collections.abc import Sequence

from anlit.data.tokenizer import vocabulary_size
from anlit.evaluation.generation import (
    Continuation,
    OnToken,
    Request,
    Sampling,
    generate,
    ignore_token,
)
from anlit.evaluation.tokenizer import CheckpointTokenizer


def continue_requests(
    tokenizer: CheckpointTokenizer,
    requests: Sequence[Request],
    max_tokens: int,
    sampling: Sampling,
    *,
    is_chat: bool = False,
    batch_size: int = 8,
    on_token: OnToken = ignore_token,
) -> list[Continuation]:
    """Continue encoded prompts with the tokenizer's model, by tokens that have a text.

    Args:
        is_chat: Whether the prompts are conversations, in which no token separates documents.

    The other arguments and the errors are those of `generate`.
    """
    return generate(
        tokenizer.checkpoint.model.model,
        requests,
        max_tokens,
        sampling,
        separator=tokenizer.inner_separator(is_chat),
        batch_size=batch_size,
        n_allowed=vocabulary_size(tokenizer.tokenizer),
        on_token=on_token,
        stop_tokens=tokenizer.stop_tokens,
    )
