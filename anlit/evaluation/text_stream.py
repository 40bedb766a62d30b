"""The text of a continuation, token by token."""

import re
from collections.abc import Sequence
from os.path import commonprefix

from tokenizers import Tokenizer

REPLACEMENT = "�"
"""The text of bytes that are not a character, or not yet."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token of a single byte, of tokenizers that fall back to bytes."""


class TextStream:
    """The text of a continuation, token by token. A piece of text is final when it is returned.

    Two things wait for later tokens. Bytes wait until they are a character. Byte tokens such as
    `<0xE2>` wait for a token of another kind. The tokenizer decodes a row of them together.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Begin after a prompt.

        Its last tokens tell whether the text begins with a space, as in Llama's tokenizer.
        """
        self._tokenizer = tokenizer
        self._context = [*prompt]
        while self._context and self._is_byte(self._context[-1]):
            self._context.pop()
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Add a token and return the text that becomes complete with it; often empty."""
        self._pending.append(token)
        if self._is_byte(token):
            return ""
        text = self._decode_pending()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context = self._pending
        self._pending = []
        return text

    def finish(self) -> str:
        """Return the text of the pending tokens; � for incomplete characters."""
        return self._decode_pending()

    def _decode_pending(self) -> str:
        context_text = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        prefix = commonprefix([context_text, text])  # noqa: RUF071  of characters, not of paths
        return text[len(prefix) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _is_byte(self, token: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None


def decode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Decode the text that tokens add to a prompt, without special tokens.

    Incomplete characters become �.
    """
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in tokens]
    return "".join(pieces) + stream.finish()
