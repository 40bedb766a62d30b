"""What `--help` of fit, validate and test says in place of Lightning's own texts.

Lightning describes what its Trainer can do in general. anlit takes fewer checkpoints and settings.
"""

from lightning.pytorch.cli import LightningArgumentParser

TITLES = {
    "trainer": "Lightning's Trainer; a run takes what docs/lightning.md lists",
    "model": "The model; anlit fit --model.help AnGPT explains a class",
    "data": "The data; anlit fit --data.help TextFiles explains a class",
    "fit": "The checkpoint",
    "validate": "The checkpoint, and what is printed",
    "test": "The checkpoint, and what is printed",
}
"""Group of settings → its title."""
CONTINUED = (
    "The checkpoint to continue from: `last` or `best` of the run folder, a checkpoint's path, or "
    "another run's folder for its last.ckpt. With --anneal the run branches from it. Null for a "
    "new run."
)
EVALUATED = (
    "The checkpoint to evaluate: `last` or `best` of the run folder, a checkpoint's path, or "
    "another run's folder for its best.ckpt. Null for best.ckpt of the run folder, and last.ckpt "
    "where there is none."
)
CHECKPOINTS = {"fit": CONTINUED, "validate": EVALUATED, "test": EVALUATED}
"""Command → what its --ckpt_path takes."""


def describe_arguments(parser: LightningArgumentParser, command: str) -> None:
    """Replace Lightning's titles and its text on --ckpt_path in the parser of a command."""
    groups = parser.groups or {}
    for name in groups.keys() & TITLES.keys():
        groups[name].title = TITLES[name]
    for action in parser._actions:
        if action.dest == "ckpt_path":
            action.help = CHECKPOINTS[command]
