"""What a run may be called: `--name`, which is also a folder's name, and `--tags`."""

import re
from collections.abc import Sequence

from anlit.errors import UserError

NAME = re.compile(r"\w[\w.+=-]*")
MOST_NAME_BYTES = 128
"""The longest name that Weights & Biases takes; with an ending it is still a folder's name."""
MOST_TAG_LETTERS = 64
"""The longest tag that Weights & Biases takes."""


def check_name(name: str | None) -> None:
    """Raise UserError for a name that is not a plain name of a folder."""
    if name is None:
        return
    if not NAME.fullmatch(name) or len(name.encode()) > MOST_NAME_BYTES:
        raise UserError(
            f"name={name!r} does not name a folder: give letters, digits and ._+=-, with a letter "
            f"or a digit first, and {MOST_NAME_BYTES} bytes at most"
        )


def split_tags(tags: str | Sequence[str] | None) -> list[str] | None:
    """Return each tag once, in order; tags in a text are separated by commas.

    Raises UserError for an empty tag or a long tag.
    """
    if tags is None:
        return None
    texts = [tags] if isinstance(tags, str) else tags
    distinct: dict[str, None] = {}
    for text in texts:
        for tag in map(str.strip, text.split(",")):
            if not tag.isprintable() or not 0 < len(tag) <= MOST_TAG_LETTERS:
                raise UserError(
                    f"tags={text!r} has the tag {tag!r}: give 1 to {MOST_TAG_LETTERS} letters "
                    "each, such as baseline,english"
                )
            distinct[tag] = None
    return list(distinct)
