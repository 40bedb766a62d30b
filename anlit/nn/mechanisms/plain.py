"""Softmax attention as in *Attention Is All You Need* (arXiv 1706.03762)."""

from anlit.nn.mechanisms.mechanism import Mechanism


class Plain(Mechanism):
    """L = S: the softmax of q·k/√d_head."""
