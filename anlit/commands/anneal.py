"""`anlit fit --anneal SHARE`: a run branched from a checkpoint. Its rate falls to 0."""

from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import Namespace

from anlit.checkpoints.location import CHECKPOINTS, LAST, is_checkpoint, last_if_run
from anlit.config.labels import CONFIG, init_args, mapping
from anlit.config.objects import class_path_of, subclass_named
from anlit.errors import UserError
from anlit.io.read import read_yaml
from anlit.training.load_model import read_model
from anlit.training.optim.schedule import Annealed, Schedule

BRANCH = "-anneal"
"""What the default run folder of a branch has behind its run's name."""


class Branch(NamedTuple):
    """A run that branches from another run."""

    folder: str | None
    """Its default folder; None if its name gives it."""
    description: str
    """`Annealing CHECKPOINT from step 20 to step 30`."""


def branch(config: Namespace) -> Branch | None:
    """Turn the configuration into the annealed run's. Without `anneal` it stays.

    The run keeps the checkpoint's weights, optimizer, step and order of the data. Its steps are the
    checkpoint's and `anneal` times as many again. `run_dir` becomes None unless it is a new one.

    Raises:
        UserError: There is no checkpoint to branch from, or it records no schedule.
    """
    if config.anneal is None:
        return None
    file = checkpoint_to_anneal(config.ckpt_path)
    content = read_model(file)
    n_steps = int(content["global_step"])
    n_more = round(config.anneal * n_steps)
    if n_more < 1:
        raise UserError(
            f"anneal={config.anneal:g} of {n_steps} steps is less than a step: give a larger "
            "share, or a checkpoint of a longer training"
        )
    schedule = configured_schedule(content, file)
    planned = mapping(content["anlit"].get("run")).get("trainer", {}).get("max_steps")
    config.ckpt_path = str(file)
    folder = leave_run_folder(file, config)
    config.trainer.max_steps = n_steps + n_more
    annealed = {"schedule": schedule, "begin": n_steps, "planned": planned or n_steps}
    config.model.init_args.schedule = Namespace(
        class_path=class_path_of(Annealed),
        init_args=Namespace(**annealed, shape="linear", final=0.0),
    )
    config.anneal = None
    return Branch(folder, f"Annealing {file} from step {n_steps} to step {n_steps + n_more}")


def checkpoint_to_anneal(ckpt_path: str | None) -> Path:
    """Return the checkpoint that `--ckpt_path` names: a file, or the last of a run folder.

    Raises UserError if there is none.
    """
    if ckpt_path in (None, "last", "best"):
        raise UserError("anneal needs the run that it branches from: give --ckpt_path RUN")
    path = Path(last_if_run(str(ckpt_path)))
    if path.is_dir() and not is_checkpoint(path):
        raise UserError(
            f"ckpt_path={ckpt_path} has no {CHECKPOINTS}/{LAST}: give a run that was trained"
        )
    return path


def configured_schedule(content: dict[str, Any], file: Path) -> Namespace:
    """Return the schedule that a checkpoint was trained with, as the parser describes it.

    Raises UserError if its class is neither anlit's nor of an imported module.
    """
    spec = content["hyper_parameters"].get("schedule")
    if not isinstance(spec, dict) or "class_path" not in spec:
        raise UserError(
            f"{file} records no schedule, and anneal begins at its rate: give another run"
        )
    kind = subclass_named(Schedule, str(spec["class_path"]), f"{file}: schedule")
    settings = init_args(spec)
    if kind is Annealed:
        raise UserError(f"{file} is of an annealed run: anneal the run that it was branched from")
    return Namespace(class_path=class_path_of(kind), init_args=Namespace(**settings))


def leave_run_folder(file: Path, config: Namespace) -> str | None:
    """Take the run's own folder and name out of the configuration, which the branch may not have.

    `run_dir` becomes None if it is the run's folder. The run's name gets an ending.

    Returns:
        The default folder of the branch: the run's folder with the ending. None if the
        configuration has a new name, which gives the folder.
    """
    run = file.resolve().parent.parent
    if config.run_dir is not None and Path(config.run_dir).resolve() == run:
        config.run_dir = None
    run_config = run / CONFIG
    name_of_run = read_yaml(run_config, dict).get("name") if run_config.is_file() else None
    if config.name is None:
        return f"{file.parent.parent}{BRANCH}"
    if config.name != name_of_run:
        return None
    config.name += BRANCH
    return f"{file.parent.parent}{BRANCH}"
