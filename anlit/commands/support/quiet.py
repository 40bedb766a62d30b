"""Hides warnings and messages of Lightning and its libraries that are of no use to users of anlit."""

import logging
import warnings

WARNINGS = (
    ".*args parameter is intended.*",
    ".*does not have many workers.*",
    ".*is an instance of `nn.Module`.*",
    ".*Checkpoint directory.*",
    ".*LeafSpec.*",
    ".*trying to `self.log\\(\\)`.*",  # what sizing traces has no Trainer
    ".*`__len__` could be inaccurate.*",
    ".*sync_dist=True.*",  # logged values are already over all ranks
    ".*You are using the .* progress bar.*",
    ".*there is no last checkpoint available.*",  # `--ckpt_path last` starts a new run in a new folder
    ".*callbacks used to create the checkpoint need to be provided.*",  # validate and test need none of them
    "(?s).*was deprecated in v4\\..*",  # Lightning calls jsonargparse so
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",
)
MESSAGES = (
    "Seed set to",
    "GPU available",
    "TPU available",
    "💡 Tip",
    "`Trainer.fit` stopped",
    "\nDetected KeyboardInterrupt",  # LastCheckpoint prints what was saved and how to continue
    "Restoring states from the checkpoint",
    "Loaded model weights from the checkpoint",  # the command prints the path before
    "Restored all states from the checkpoint",
)


def quiet() -> None:
    """Hide these; show all other warnings and messages."""
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(MESSAGES)
