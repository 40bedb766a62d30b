"""Every run's configuration of a study, read by the parser of `anlit fit` before the first run starts."""

import importlib.util
import shlex
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anlit.analysis.study.plan import Study, Trial, read_config
from anlit.errors import UserError


def check_study(study: Study) -> None:
    """Check all that the study will do: every run's configuration, the report's sections, the commands afterwards.

    Raises:
        UserError: Something of it would fail.
    """
    from anlit.analysis.study.sections import require_sections  # with matplotlib, as torch: --help does not wait

    require_sections(study)
    for name, template in (study.content.get("after") or {}).items():
        program, command, *_ = [*shlex.split(str(template)), "", ""]
        if program != "anlit" or importlib.util.find_spec(f"anlit.commands.{command}") is None:
            raise UserError(
                f"after of {study.path} has {name}: {template}, which is no command of anlit's: give one such as "
                "`anlit lengths {runs} --output {output}`"
            )
    check_runs(study)


def check_runs(study: Study) -> None:
    """Read the configuration of every arm at every point of its grid, and make its model without memory for weights.

    Raises:
        UserError: `anlit fit` would refuse one; it names the arm, the key and the file.
    """
    from anlit.commands.support.bounds import (
        check_bounds,  # torch takes seconds: --help and a wrong YAML do not wait for it
    )
    from anlit.commands.support.messages import one_sentence
    from anlit.commands.support.parser import RunParser, known_keys, model_of, origin, read_command, require_yaml
    from anlit.commands.support.quiet import quiet
    from anlit.shipped import with_configuration_files

    quiet()
    parser: Any = None
    for run in _different(study):
        arguments = with_configuration_files(["fit", *run.options(Path("runs"))])
        try:
            require_yaml(arguments)
            if parser is None:
                cli = read_command(RunParser, arguments)
                parser, settings = cli.parser, cli.config["fit"]
                one = cli.parser_of("fit")
            else:
                settings = parser.parse_args(arguments)["fit"]
            check_bounds(settings)
            model_of(one, settings)
        except ArgumentError as error:
            raise _refusal(run, study, one_sentence(str(error), known_keys())) from error
        except ValueError as error:
            raise _refusal(run, study, str(origin(error))) from error


def _different(study: Study) -> Iterator[Trial]:
    """Each arm at each of its points once, with a seed; and each further seed once."""
    seeds = [*study.seeds, *study.tuning_seeds]
    for arm in study.arms:
        for point in arm.points:
            yield Trial(arm, point, seeds[0])
    for seed in seeds[1:]:
        yield Trial(study.arms[0], study.arms[0].points[0], seed)


def _refusal(run: Trial, study: Study, sentence: str) -> UserError:
    """The parser's sentence, with the arm and the file that has the key."""
    key = sentence.split("=")[0].split()[0].rsplit(".", 1)[-1]
    below = [config for config in run.arm.configs if key in _keys(read_config(config))]
    in_study = any(key == name.rsplit(".", 1)[-1] for name in run.settings)
    file = study.path if in_study or not below else below[-1]
    return UserError(f"arm '{run.arm.name}', {file}: {sentence}")


def _keys(content: Any) -> Iterator[str]:
    """Every key of nested mappings, whatever its depth."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield str(key)
            yield from _keys(value)
