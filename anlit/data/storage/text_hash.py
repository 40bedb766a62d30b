"""A hash of the documents of a split, which no tokenizer changes.

    text_sha256 = Σ SHA-256(UTF-8 of a document) mod 2²⁵⁶

A sum depends neither on the order of the documents nor on the tasks that prepare them. So folders
of one source have the same hash, whatever their tokenizers, and a mixture has the sum of its
folders (a multiset hash, Clarke et al. 2003).
"""

import hashlib
from collections.abc import Iterable

TEXT_HASH = "text_sha256"
"""Key of the hash in records of tasks and in the manifest; absent if the text is not known."""
MODULUS = 1 << 256


def hash_text(text: str) -> int:
    """The number that a document adds to the hash of its split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def as_hex(total: int) -> str:
    """A sum of documents as the manifest has it."""
    return f"{total % MODULUS:064x}"


def add_text_hashes(hashes: Iterable[str | None]) -> str | None:
    """The hash of several parts together; None if the text of a part is not known."""
    total = 0
    for text_hash in hashes:
        if text_hash is None:
            return None
        total += int(text_hash, 16)
    return as_hex(total)
