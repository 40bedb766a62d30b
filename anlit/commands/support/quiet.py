"""What Lightning and its libraries say that tells a user of anlit nothing."""

import logging
import warnings

WARNINGS = (
    ".*args parameter is intended.*",
    ".*does not have many workers.*",
    ".*is an instance of `nn.Module`.*",
    ".*Checkpoint directory.*",
    ".*LeafSpec.*",
    ".*`__len__` could be inaccurate.*",
    ".*sync_dist=True.*",  # what is logged here is already of all ranks
    ".*You are using the .* progress bar.*",
)
MESSAGES = (
    "Seed set to",
    "GPU available",
    "TPU available",
    "💡 Tip",
    "`Trainer.fit` stopped",
    "\nDetected KeyboardInterrupt",  # LastCheckpoint says what was saved and how to go on
    "Restoring states from the checkpoint",
    "Loaded model weights from the checkpoint",  # the command says which, before
    "Restored all states from the checkpoint",
)


def quiet() -> None:
    """Keep them away; warnings and messages about anything else come through."""
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(MESSAGES)
