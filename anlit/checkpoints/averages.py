"""The entries of a checkpoint whose run averages its weights.

`state_dict` has the averages, so every reader of weights gets them. Training goes on from the
weights in `CURRENT`. Lightning's `WeightAveraging` has the same keys.
"""

from typing import Any

CURRENT = "current_model_state"
"""The weights after the last optimizer step."""
STATE = "averaging_state"
"""`n_averaged` steps are in the averages. `first_step` is the first of them, from 0."""
AVERAGES = "averages"
"""The averages of a checkpoint that a run continues from. No file has this key."""


def separate_averages(checkpoint: dict[str, Any]) -> None:
    """Move averages to `AVERAGES` and weights to `state_dict`, for a run that continues.

    A checkpoint without averages, or with averages that were moved, stays.
    """
    if CURRENT in checkpoint:
        checkpoint[AVERAGES] = checkpoint["state_dict"]
        checkpoint["state_dict"] = checkpoint.pop(CURRENT)
