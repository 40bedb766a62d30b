"""Checks that a study compares its arms fairly, before any run starts."""

from collections import Counter
from collections.abc import Iterable, Sequence

from anlit.config.schema import (
    CORPUS,
    PATHS,
    VALIDATION,
    changes_measure,
    row_of,
    schema_key,
)
from anlit.errors import UserError
from anlit.study.grid import GridPoint
from anlit.study.plan import Study


def check_distinct_seeds(seeds: Sequence[GridPoint], location: str) -> None:
    """Raise UserError if two seeds have the same `Run.seeds`, by which runs are paired."""
    name_by_pair: dict[tuple[str | None, str | None], str] = {}
    for seed in seeds:
        values: dict[str, str] = {}
        for key, value in seed.settings.items():
            values[key.replace(".init_args", "")] = str(value)
        pair = (values.get("seed_everything"), values.get("data.seed"))
        if pair in name_by_pair:
            raise UserError(
                f"{location} has {name_by_pair[pair]} and {seed.name}, which do not differ in "
                "seed_everything or data.init_args.seed, by which runs are paired: "
                "leave one out, or give it others"
            )
        name_by_pair[pair] = seed.name


def check_fairness(study: Study) -> None:
    """Raise UserError if the study is ambiguous or unfair.

    Two arms have the same name or title, or nothing would be run. A setting would be ignored. A
    seed both tunes and measures. A grid changes the validation tokens. Grids have different sizes
    without `equal_tuning: false`.
    """
    bases = dict.fromkeys(arm.base for arm in study.arms)
    _check_distinct(study, (arm.name for arm in study.arms))
    _check_distinct(study, (arm.title for arm in study.arms))
    _check_distinct(study, map(study.title_of, bases))
    _check_settings(study)
    if any(arm.is_tuned for arm in study.arms):
        if not study.tuning_seeds:
            raise UserError(
                f"{study.path} has grids to tune and no tuning_seeds: give `tuning_seeds: [0]`"
            )
        _check_tuning_seeds(study)
        _check_tuned_settings(study)
    elif not study.seeds:
        raise UserError(
            f"{study.path} has neither seeds nor anything to tune: give `seeds: [1, 2, 3]`"
        )
    _check_equal_tuning(study)
    _check_annealing(study)


def _check_distinct(study: Study, names: Iterable[str]) -> None:
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{study.path} has two arms with the name or title '{name}', which a report would mix "
            "up: give each its own"
        )


def _check_settings(study: Study) -> None:
    """Refuse settings that both arms and seeds have, because the seed's win. Refuse `name`."""
    seed_keys: set[str] = set()
    for seed in (*study.seeds, *study.tuning_seeds):
        seed_keys.update(seed.settings)
    for arm in study.arms:
        arm_keys = set(arm.settings)
        for point in arm.points:
            arm_keys.update(point.settings)
        both = seed_keys & arm_keys
        if both:
            raise UserError(
                f"arm '{arm.name}' of {study.path} sets {min(both)}, which its seeds set too: "
                "leave it out, and give its values with `seeds` and `tuning_seeds`"
            )
        if "name" in seed_keys | arm_keys:
            raise UserError(
                f"{study.path} sets name, and a study names its runs by arm, point and seed: leave "
                "it out, and give the arm a `title`"
            )


def _check_tuning_seeds(study: Study) -> None:
    """Refuse a seed that measures and whose settings a tuning seed has, or the reverse."""
    for seed in study.seeds:
        for tuning_seed in study.tuning_seeds:
            settings = seed.settings.items()
            tuning_settings = tuning_seed.settings.items()
            if settings <= tuning_settings or tuning_settings <= settings:
                raise UserError(
                    f"{study.path} measures on the seed {seed.shown.get('seed', seed.name)}, on "
                    "which it also tunes: give `seeds` and `tuning_seeds` without a common one"
                )


def _check_tuned_settings(study: Study) -> None:
    """Refuse to tune a setting that changes the validation tokens: the losses do not compare."""
    for arm in study.arms:
        for point in arm.points:
            for key in map(schema_key, point.settings):
                if _changes_validation_tokens(key):
                    raise UserError(
                        f"arm '{arm.name}' of {study.path} tunes {key}, and losses on other "
                        "validation tokens do not compare: leave it out of `tune`"
                    )


def _changes_validation_tokens(key: str) -> bool:
    row = row_of(key)
    if row is None:  # of a user's own class
        return False
    is_of_data = key.partition(".")[0] == "data"
    return changes_measure(key) or (is_of_data and row.role in (CORPUS, PATHS, VALIDATION))


def _check_annealing(study: Study) -> None:
    """Refuse grids beside `anneal`: they would be tuned by losses at the peak rate."""
    if study.annealing is None:
        return
    for arm in study.arms:
        if arm.is_tuned:
            raise UserError(
                f"arm '{arm.name}' of {study.path} has `tune`, and a run with `anneal` has a final "
                "loss at its peak rate: tune in a study of its own with the schedule anlit.WSD, "
                "and give the best as settings"
            )


def unequal_tuning(study: Study) -> str:
    """`gpt 1, angpt 3`: the settings that each arm tries. "" if all try as many.

    An arm with a single setting is not tuned, and counts.
    """
    sizes = {len(arm.points) for arm in study.arms}
    if len(sizes) == 1:
        return ""
    return ", ".join(f"{arm.name} {len(arm.points)}" for arm in study.arms)


def _check_equal_tuning(study: Study) -> None:
    counts = unequal_tuning(study)
    if counts and study.content.get("equal_tuning") is not False:
        raise UserError(
            f"the arms of {study.path} are tuned over different numbers of settings ({counts}), "
            "which favours some: make them equal, or allow it with `equal_tuning: false`"
        )
