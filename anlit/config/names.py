"""What a run may be called: `--name`, which is also a folder's name, and `--tags`."""

from collections.abc import Sequence

from anlit.errors import UserError

FURTHER_CHARACTERS = "._+=-"
"""Characters of a name besides letters, digits and `_` at its beginning."""
MOST_NAME_BYTES = 128
"""The longest name that Weights & Biases takes; with an ending it is still a folder's name."""
MOST_TAG_LETTERS = 64
"""The longest tag that Weights & Biases takes."""


def check_name(name: str | None) -> None:
    """Raise UserError for a name that is no plain name of a folder."""
    if name is None:
        return
    if not name:
        raise UserError("name is empty: give one such as gpt-wide, or leave it out")
    if not (name[0].isalnum() or name[0] == "_"):
        raise UserError(f"name={name!r} begins with {name[0]!r}: begin it with a letter or a digit")
    for character in name:
        if not (character.isalnum() or character in FURTHER_CHARACTERS):
            raise UserError(
                f"name={name!r} has {character!r}, and it is also the name of a folder: use "
                f"letters, digits and {FURTHER_CHARACTERS}"
            )
    n_bytes = len(name.encode())
    if n_bytes > MOST_NAME_BYTES:
        raise UserError(
            f"name={name[:20]}… has {n_bytes} bytes: give one of at most {MOST_NAME_BYTES}"
        )


def split_tags(tags: str | Sequence[str] | None) -> list[str] | None:
    """Return each tag once, in order; tags in a text are separated by commas.

    Raises UserError for an empty tag, or one that is too long.
    """
    if tags is None:
        return None
    texts = [tags] if isinstance(tags, str) else tags
    distinct: dict[str, None] = {}
    for text in texts:
        for tag in map(str.strip, text.split(",")):
            _check_tag(tag, text)
            distinct[tag] = None
    return list(distinct)


def _check_tag(tag: str, text: str) -> None:
    if not tag:
        raise UserError(f"tags={text!r} has an empty tag: give such as baseline,english")
    if not tag.isprintable():
        raise UserError(f"tags={text!r} has a tag with a control character: leave it out")
    if len(tag) > MOST_TAG_LETTERS:
        raise UserError(
            f"tags={tag[:20]}… has a tag of {len(tag)} letters: give at most {MOST_TAG_LETTERS}"
        )
