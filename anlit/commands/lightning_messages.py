"""Hides messages of Lightning and its libraries that tell users nothing."""

import logging
import re
import warnings

HIDDEN_WARNINGS = (
    ".*args parameter is intended.*",
    ".*does not have many workers.*",
    ".*Checkpoint directory.*",
    ".*LeafSpec.*",
    ".*trying to `self.log\\(\\)`.*",  # sizing traces a model without a Trainer
    ".*`__len__` could be inaccurate.*",
    ".*sync_dist=True.*",  # anlit logs values that are reduced over ranks already
    ".*You are using the .* progress bar.*",
    ".*there is no last checkpoint available.*",  # a new run with `--ckpt_path last`
    ".*callbacks used to create the checkpoint need to be provided.*",  # validation needs none
    ".*have no `val_dataloader`.*",  # data_messages has it
    ".*ended before the epoch ended and your dataloader is not resumable.*",  # data_messages has it
    "(?s).*was deprecated in v4\\..*",  # Lightning calls a deprecated part of jsonargparse
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",
)
"""Patterns of the hidden warnings."""
LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.seed",
)
"""Names of the loggers that write the messages below."""
HIDDEN_MESSAGES = (
    "Seed set to",
    "GPU available",
    "TPU available",
    "💡 Tip",
    # A run's first line has device, number of ranks and precision.
    "Using bfloat16 Automatic Mixed Precision",
    "LOCAL_RANK:",
    "Initializing distributed:",
    "-" * 100 + "\ndistributed_backend=",
    "You are using a CUDA device",  # it advises faster products in float32
    "`Trainer.fit` stopped",
    "`Trainer(",  # it counts batches, and anlit optimizer steps
    "\nDetected KeyboardInterrupt",  # LastCheckpoint prints how to continue
    "Restoring states from the checkpoint",
    "Loaded model weights from the checkpoint",  # the command prints the path
    "Restored all states from the checkpoint",
)
"""Beginnings of the hidden messages. With several ranks `[rank: 1] ` precedes them."""


def hide_messages() -> None:
    """Hide the warnings and log messages of the tables above."""
    for pattern in HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    message = re.sub(r"^\[rank: \d+\] ", "", record.getMessage())
    return not message.startswith(HIDDEN_MESSAGES)
