"""Checks a study before its first run: every configuration, the report's sections, the commands.

An error after days of training would come too late. Words of a study: an arm is a configuration to
measure. A point is a choice of the settings that the arm tunes. `after` has commands that run on
the finished runs, as `name: anlit …`.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anlit.commands import COMMANDS
from anlit.config.labels import mapping
from anlit.errors import UserError
from anlit.runs.folders import read_run_record
from anlit.study.anneal import SCHEDULE, Annealing
from anlit.study.grid import GridPoint
from anlit.study.plan import PlannedRun, Study

if TYPE_CHECKING:
    from anlit.commands.parser import ConfigurationParser
    from anlit.training.optim.schedule import Schedule


def check_study(study: Study, output: Path) -> None:
    """Raise UserError if a run of the study or its report could not succeed.

    Runs in the folder `output` belong to the study, so they must have been trained on its data.
    """
    # Here, because it imports matplotlib, which takes a second.
    from anlit.study.sections.registry import check_sections

    check_sections(study)
    _check_after_commands(study)
    _check_configurations(study, output)


def _check_after_commands(study: Study) -> None:
    """Raise UserError for an entry of `after` that is not a command of anlit."""
    commands: Mapping[str, str | None] = study.content.get("after") or {}
    for name, template in commands.items():
        entry = f"after of {study.path} has {name}: {template}, which is not a command"
        try:
            command = shlex.split(template or "")
        except ValueError as error:
            raise UserError(f"{entry} ({error})") from error
        is_known = len(command) > 1 and command[0] == "anlit" and command[1] in COMMANDS
        if not is_known:
            fix = "give one such as `anlit lengths {runs} --output {output}`"
            raise UserError(f"{entry} of anlit's: {fix}")


def _check_configurations(study: Study, output: Path) -> None:
    """Raise UserError if the configuration of a run is wrong, or its data were replaced."""
    # Here, because it imports torch, which takes seconds.
    from anlit.commands.parser import ConfigurationParser, manifest_of_data, read_command
    from anlit.commands.run_checks import check_machine, check_run, try_trainer

    tokenizers: dict[str, str] = {}
    tried_settings: list[Any] = []
    parser: ConfigurationParser | None = None  # takes a second to build, so all runs share it
    for run in _runs_to_check(study):
        arguments = ["fit", *run.options(Path("runs"))]  # nothing is written to this folder
        try:
            if parser is None:
                parser = read_command(ConfigurationParser, arguments)
            config = parser.parse_again(arguments)
            model = check_run(parser, config)
            # Once for equal settings, because a constructor of the user's may do more than store.
            trainer_settings = (config.trainer.as_dict(), config.checkpoint_every_n_steps)
            if trainer_settings not in tried_settings:
                try_trainer(parser, config)
                tried_settings.append(trainer_settings)
            if config.trainer.accelerator == "cpu":  # a GPU may be another machine's
                check_machine(config, model, "cpu")
            manifest = manifest_of_data(config.data) or {}
            tokenizers[run.arm.name] = manifest.get("tokenizer_sha256") or ""
            _refuse_replaced_data(study, run, output, manifest.get("content_sha256"))
            if study.annealing is not None and model is not None:
                _check_stable_rate(model.schedule, study.annealing)
        except UserError as error:
            sentence = str(error).lstrip("-")
            raise UserError(f"arm '{run.arm.name}' of {study.path}: {sentence}") from error
    if parser is not None:
        _check_whole_numbers(study, parser)
    _check_tokenizers(study, tokenizers)


def _refuse_replaced_data(
    study: Study, run: PlannedRun, output: Path, content_sha256: str | None
) -> None:
    """Raise UserError if a run of the same arm and point was trained on other text.

    Args:
        study: The study.
        run: The run whose data were found.
        output: The study's folder.
        content_sha256: The hash of the data that `run` would read. None if they are not prepared.
    """
    for seed in (run.seed, *study.seeds, *study.tuning_seeds):
        if any(key.startswith("data.") and "path" in key for key in seed.settings):
            continue  # each seed has a corpus of its own
        folder = output / PlannedRun(run.arm, run.point, seed).name
        record = read_run_record(folder)
        trained_on = mapping(record.get("data")).get("content_sha256")
        if content_sha256 and trained_on and trained_on != content_sha256:
            raise UserError(
                f"{folder} was trained on other data (content {trained_on[:12]}) than "
                f"{record['data'].get('path', 'the folder')} has now ({content_sha256[:12]}): "
                "prepare the data as they were, or give another --output"
            )


def _check_tokenizers(study: Study, tokenizers: Mapping[str, str]) -> None:
    """Raise UserError if arms are compared whose prepared data have different tokenizers.

    `tokenizers` has a hash by the name of an arm; "" if it is not known.
    """
    for comparison in study.comparisons:
        arms_by_tokenizer = {tokenizers[arm.name]: arm.name for arm in comparison.arms}
        arms_by_tokenizer.pop("", None)
        if len(arms_by_tokenizer) > 1:
            first, second, *_ = arms_by_tokenizer.values()
            raise UserError(
                f"arms '{first}' and '{second}' of {study.path} have data with different "
                "tokenizers, whose losses per token a study does not compare: train them in two "
                "studies, and give both to anlit compare"
            )


def _check_whole_numbers(study: Study, parser: "ConfigurationParser") -> None:
    """Raise UserError if a range draws only whole numbers of a setting that takes fractions."""
    for arm in study.arms:
        for search_range in arm.ranges:
            if not search_range.is_integer:
                continue
            fraction = {search_range.key: search_range.low + 0.5}
            point = GridPoint({}, arm.points[0].settings | fraction)
            run = PlannedRun(arm, point, study.tuning_seeds[0])
            try:
                parser.parse_again(["fit", *run.options(Path("runs"))])
            except UserError:
                continue
            raise UserError(
                f"arm '{arm.name}', {study.path}: {search_range.key} takes fractions, and both "
                f"ends of its range are whole numbers: write low as {float(search_range.low)}"
            )


def _check_stable_rate(schedule: "Schedule", annealing: Annealing) -> None:
    """Raise UserError if a stable run's rate changes after its first branch."""
    first, *_, last = [*annealing.branches, annealing.branches[-1]]
    factors = {schedule.factor(step, last) for step in range(first - 1, last)}
    if len(factors) > 1:
        raise UserError(
            f"{SCHEDULE} changes the rate after step {first}, from which `anneal` branches: give "
            "anlit.Constant, with a warm-up that ends before"
        )


def _runs_to_check(study: Study) -> list[PlannedRun]:
    """Return each arm at each of its points with the first seed, and an arm with each further seed.

    A seed does not decide whether other settings fit, so not every combination is checked.
    """
    first_seed, *further_seeds = [*study.seeds, *study.tuning_seeds]
    runs = []
    for arm in study.arms:
        runs += [PlannedRun(arm, point, first_seed) for point in arm.points]
    first_arm = study.arms[0]
    runs += [PlannedRun(first_arm, first_arm.points[0], seed) for seed in further_seeds]
    return runs
