"""Limits of PyTorch's attention kernels on CUDA, which many short sequences in a batch reach.

Flash attention, cuDNN's kernel and FlexAttention have a block of their grid for each sequence, on
an axis of 65,535 (PyTorch issues 146704 and 181085). The backward pass of flash attention pads
every sequence to 128 tokens more, and computes addresses in 32 bits (flash-attention PR 2260). A
launch beyond the first limit fails, and addresses beyond the second are of other memory. PyTorch's
memory-efficient attention splits the rows of larger batches, but then drops no weights and has no
gradient of a mask. The kernels in `triton/` and `eager` have no such limits.
"""

MOST_SEQUENCES = 65_535
"""The most sequences in a call: rows of a batch, or packed documents."""

LARGEST_GRADIENT = 2**31
"""The numbers that flash attention's backward pass can address, padding included."""

FLASH_PADDING = 128
"""Tokens that flash attention adds to a sequence at most."""


def too_many_sequences(n_sequences: int) -> str | None:
    """Return a reason against a batch with more sequences than `MOST_SEQUENCES`."""
    if n_sequences <= MOST_SEQUENCES:
        return None
    return f"it computes at most {MOST_SEQUENCES:,} documents or rows, not {n_sequences:,}"


def too_large_for_flash(
    n_sequences: int, n_tokens: int, n_heads: int, d_head: int, needs_gradient: bool
) -> str | None:
    """Return a reason against a batch that flash attention or its gradient cannot compute.

    `n_tokens` counts all tokens of the batch.
    """
    reason = too_many_sequences(n_sequences)
    if reason is not None or not needs_gradient:
        return reason
    if flash_gradient_is_too_large(n_sequences, n_tokens, n_heads, d_head):
        limit = LARGEST_GRADIENT // (n_heads * padded_width(d_head))
        reason = (
            f"it computes at most {limit:,} tokens for these heads, with {FLASH_PADDING} more for "
            f"each document or row, and the batch has {n_tokens:,} in {n_sequences:,}"
        )
    return reason


def flash_gradient_is_too_large(n_sequences: int, n_tokens: int, n_heads: int, d_head: int) -> bool:
    """Whether flash attention's backward pass would compute wrong addresses."""
    n_padded = n_tokens + FLASH_PADDING * n_sequences
    return n_padded * n_heads * padded_width(d_head) > LARGEST_GRADIENT


def padded_width(d_head: int) -> int:
    """The width to which flash attention pads heads."""
    return 256 if d_head > 192 else -(-d_head // 32) * 32
