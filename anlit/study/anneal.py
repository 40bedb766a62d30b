"""`anneal` of a study: stable runs that keep checkpoints, and runs that branch from them.

    anneal: {max_steps: [500, 1000, 2000, 4000], decay: 0.2}

A stable run keeps the rate of its schedule. It has a checkpoint at each branch. An annealed run
begins there. Its rate falls on a line to 0 in the last `decay` of its steps, as with `anlit.WSD`
(arXiv 2404.06395). So a stable run has an annealed loss at several lengths. Each length costs its
decay alone (arXiv 2405.18392).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.config.labels import as_list, init_args, mapping
from anlit.config.schema import schema_key
from anlit.io.read import read_yaml

DEFAULT_DECAY = 0.2
"""As `anlit.WSD` has it."""
SCHEDULE = "model.init_args.schedule"
MAX_STEPS = "trainer.max_steps"
CALLBACKS = "trainer.callbacks+"
"""The option of `anlit fit` that adds callbacks to those of configuration files."""
STEP_CHECKPOINTS = "anlit.training.callbacks.checkpoints.StepCheckpoints"
LENGTHS = (MAX_STEPS, "trainer.max_epochs", "max_tokens", "tokens_per_parameter")
"""Settings that give the length of a run."""


@dataclass(frozen=True)
class Annealing:
    """The lengths at which every measured run is annealed.

    Args:
        max_steps: Optimizer steps at the end of each annealed run, in ascending order.
        decay: Share of them, at the end, in which the rate falls.
    """

    max_steps: tuple[int, ...]
    decay: float = DEFAULT_DECAY

    def n_stable(self, max_steps: int) -> int:
        """Optimizer steps before the rate falls, of `max_steps`."""
        return max_steps - round(self.decay * max_steps)

    @property
    def branches(self) -> list[int]:
        """Optimizer steps of the stable run at which annealed runs begin, in ascending order."""
        return [self.n_stable(max_steps) for max_steps in self.max_steps]

    def stable_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """`settings` of an arm, with the length and the checkpoints of its stable runs."""
        steps = {"class_path": STEP_CHECKPOINTS, "init_args": {"steps": self.branches}}
        # Options such as trainer.callbacks.decay change the last callback, the arm's own.
        callbacks = [steps, *as_list(settings.get(CALLBACKS))]
        return settings | {MAX_STEPS: self.branches[-1], CALLBACKS: callbacks}


def annealed_settings(settings: dict[str, Any], max_steps: int) -> dict[str, Any]:
    """A stable run's settings for `max_steps` steps, without schedule and added checkpoints."""
    remaining: dict[str, Any] = {}
    for key, value in settings.items():
        if not f"{schema_key(key)}.".startswith("model.schedule."):
            remaining[key] = value
    _, *callbacks = settings[CALLBACKS]  # the first is of `stable_settings`
    # At its place, because an option such as trainer.callbacks.decay changes the callback before.
    remaining[CALLBACKS] = callbacks
    if not callbacks:
        del remaining[CALLBACKS]
    return remaining | {MAX_STEPS: max_steps}


def annealed_schedule(config: Path, n_stable: int) -> dict[str, Any]:
    """The schedule of a run that branches after `n_stable` steps, as `anlit fit` reads it.

    `config` is the stable run's config.yaml. Raises UserError if it cannot be read.
    """
    content = read_yaml(config, {"model": dict, "trainer": dict})
    arguments = {
        "schedule": init_args(content.get("model"))["schedule"],
        "begin": n_stable,
        "planned": mapping(content.get("trainer"))["max_steps"],
        # Given in full: a class that replaces another keeps the arguments that both have.
        "shape": "linear",
        "final": 0.0,
    }
    return {"class_path": "anlit.Annealed", "init_args": arguments}
