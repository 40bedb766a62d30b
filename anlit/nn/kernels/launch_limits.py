"""Limits of PyTorch's attention kernels on CUDA, which many short sequences in a batch reach.

Flash attention, cuDNN's kernel and FlexAttention have a block of their grid for each sequence, on
an axis of 65,535 (PyTorch issues 146704 and 181085). The backward pass of flash attention pads
every sequence to 128 tokens more, and computes addresses in 32 bits (flash-attention PR 2260). A
launch beyond the first limit fails, and addresses beyond the second are of other memory. The
kernels in `triton/` have neither limit.
"""

from anlit.errors import UserError

MOST_SEQUENCES = 65_535
"""The most sequences in a call: rows of a batch, or packed documents."""

LARGEST_GRADIENT = 2**31
"""The numbers that flash attention's backward pass can address, padding included."""

FLASH_PADDING = 128
"""Tokens that flash attention adds to a sequence at most."""


def check_sequences(kernel: str, n_sequences: int) -> None:
    """Raise UserError if a batch has more sequences than `MOST_SEQUENCES`."""
    if n_sequences > MOST_SEQUENCES:
        raise _too_many(kernel, n_sequences, f"computes at most {MOST_SEQUENCES:,} of them")


def check_flash(n_sequences: int, n_tokens: int, n_heads: int, d_head: int) -> None:
    """Raise UserError if flash attention cannot compute a batch or its gradient.

    `n_tokens` counts all tokens of the batch.
    """
    check_sequences("flash", n_sequences)
    if flash_gradient_is_too_large(n_sequences, n_tokens, n_heads, d_head):
        limit = LARGEST_GRADIENT // (n_heads * padded_width(d_head))
        sentence = (
            f"allows at most {limit:,} tokens for these heads, with {FLASH_PADDING} more for each "
            f"sequence, and the batch has {n_tokens:,}"
        )
        raise _too_many("flash", n_sequences, sentence)


def flash_gradient_is_too_large(n_sequences: int, n_tokens: int, n_heads: int, d_head: int) -> bool:
    """Whether flash attention's backward pass would compute wrong addresses."""
    n_padded = n_tokens + FLASH_PADDING * n_sequences
    return n_padded * n_heads * padded_width(d_head) > LARGEST_GRADIENT


def padded_width(d_head: int) -> int:
    """The width to which flash attention pads heads."""
    return 256 if d_head > 192 else -(-d_head // 32) * 32


def _too_many(kernel: str, n_sequences: int, limit: str) -> UserError:
    return UserError(
        f"a batch has {n_sequences:,} documents or rows, and attention kernel {kernel!r} {limit}: "
        "set model.kernel=triton, or a smaller data.batch_size"
    )
