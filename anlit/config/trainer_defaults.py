"""The defaults of anlit that differ from the defaults of Lightning's Trainer; without torch."""

from typing import Any

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_steps": 1000,
    "gradient_clip_val": 1.0,
    "val_check_interval": 100,
    # val_check_interval counts optimizer steps across epochs (training/callbacks/whole_steps.py).
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    # RunProgress prints the number of parameters.
    "enable_model_summary": False,
}
