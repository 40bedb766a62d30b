"""Reads the measurements of `anlit lengths`."""

from typing import Any

Result = dict[str, Any]
"""The measurements of a checkpoint at a length and masking."""


def find(results: list[Result], length: int, masked: bool) -> Result:
    """The result at a length and masking."""
    for result in results:
        if result["length"] == length and result["masking"] == masked:
            return result
    raise AssertionError(f"nothing at length {length}")


def total_loss(result: Result) -> float:
    return result["total"]["loss"]
