"""Registers sentences of the pages of results, with the figures that the records give."""

from collections.abc import Callable, Iterable, Iterator

from tests.docs.records import figure
from tests.docs.result_claims import Claim

Sentences = Callable[[], Iterator[str]]
SECTIONS: list[tuple[str, str, Sentences]] = []
"""Page, heading, and the function that yields parts of the section's sentences."""


def section(page: str, heading: str) -> Callable[[Sentences], Sentences]:
    """Register the sentences of a section."""

    def register(sentences: Sentences) -> Sentences:
        SECTIONS.append((page, heading, sentences))
        return sentences

    return register


def section_claims() -> Iterator[Claim]:
    for page, heading, sentences in SECTIONS:
        for sentence in sentences():
            yield page, heading, sentence


def extremes(values: Iterable[float], unit: str = "") -> list[str]:
    """Return the smallest and the largest value: `8.4M`, `11.3M`."""
    low, *_, high = sorted([*values])
    return [figure(low) + unit, figure(high) + unit]


def from_to(values: Iterable[float], unit: str = "") -> str:
    """`8.4M to 11.3M`."""
    return " to ".join(extremes(values, unit))


def from_and(values: Iterable[float]) -> str:
    """`8.4 and 11.3`."""
    return " and ".join(extremes(values))
