"""Makes one sentence of an error of Lightning about the Trainer's settings. Without torch."""

import difflib
import re

from anlit.config.error_messages import LONGEST_MESSAGE

ADVICE = {
    "No supported gpu backend found|CUDAAccelerator": "trainer.accelerator needs a GPU, and none "
    "was found: set --trainer.accelerator cpu --trainer.devices 1, or check with nvidia-smi",
    "CPUAccelerator|not a valid input using cpu": "trainer.devices is not a number of processes: "
    "give --trainer.devices 1 or more on CPU",
    "not a valid input using": "trainer.devices is not a number of devices: give "
    "--trainer.devices 1 or more, or -1 for all devices",
    "`test_dataloader` must be": "the data have no test_dataloader: use `anlit validate` for the "
    "loss on their validation split",
    "Timer.duration=": "trainer.max_time is not a duration: give DD:HH:MM:SS, such as 00:12:00:00 "
    "for twelve hours",
}
"""A pattern in a message of Lightning → the sentence in its place."""

_MONITOR = (
    r"(?:metric `?|monitor=')(?P<name>[^`' ]+)[`')]* "
    r"(?:which is not available|could not find the monitored key)(?P<rest>.*?)"
    r"(?:\. (?:HINT|Condition)|$)"
)
"""Lightning's words for a metric that a callback monitors and nobody logs."""


def explain_lightning_error(error: Exception) -> str:
    """The sentence for an error of Lightning about the Trainer's settings."""
    message = " ".join(str(error).split())
    for pattern_of_advice, advice in ADVICE.items():
        if re.search(pattern_of_advice, message):
            return advice
    monitor = re.search(_MONITOR, message)
    if monitor:
        # The names come after the last words of Lightning's that end with a colon.
        names = monitor["rest"].rpartition(": ")[2]
        return _explain_monitor(monitor["name"], re.findall(r"[`']([^`',]+)[`']", names))
    return f"trainer: {message[:LONGEST_MESSAGE].rstrip('.')}"


def _explain_monitor(name: str, metrics: list[str]) -> str:
    """A callback waits for a metric that is not among the logged `metrics`."""
    near = difflib.get_close_matches(name.replace("_", "/"), metrics, n=1)
    fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(metrics)}"
    return f"a callback monitors {name}, which is not logged: {fix}"


def is_lightning_error(error: Exception) -> bool:
    """Whether Lightning refuses a setting of the Trainer or of its callbacks."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    return re.search(_MONITOR, str(error)) is not None
