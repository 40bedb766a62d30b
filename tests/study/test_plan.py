"""A study's YAML becomes runs: grids, budgets, seeds, equal tuning, names of run folders."""

from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.study.estimate import Cost, describe_plan, estimate_cost
from anlit.study.grid import expand_grid
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from tests.study.conftest import (
    STUDY,
    arms_with,
    attributes,
    changed_study,
    shared_with,
    write_study,
)

TOKENS_PER_STEP = 8 * 256


def test_a_grid_is_the_product_of_its_lines_and_a_list_of_grids_their_union() -> None:
    product = {"m.lr": [0.1, 0.2], "m.depth": [1, 2]}
    same_point = {"m.lr": 0.1, "m.depth": 2}

    points = expand_grid([product, same_point], "here")

    names = attributes(points, "name")
    assert sorted(names) == [
        "depth=1_lr=0.1",
        "depth=1_lr=0.2",
        "depth=2_lr=0.1",
        "depth=2_lr=0.2",
    ]


@pytest.mark.parametrize("key", ["class_path", "init_args"])
def test_a_key_that_names_no_setting_is_its_own_name(key: str) -> None:
    """`anlit fit` refuses the key in a sentence."""
    (point,) = expand_grid({key: [1]}, "tune")

    assert point.name == f"{key}=1"


def test_keys_with_the_same_last_name_keep_what_tells_them_apart() -> None:
    first_grid = {"m.first.lr": [1], "m.second.lr": [2]}
    second_grid = {"m.second.lr": 2}

    points = expand_grid([first_grid, second_grid], "here")

    shown = attributes(points, "shown")
    assert shown == [{"first.lr": 1, "second.lr": 2}, {"second.lr": 2}]


def test_a_named_choice_changes_several_settings() -> None:
    sizes = {"small": {"m.d": 1, "m.h": 1}, "large": {"m.d": 2, "m.h": 2}}

    points = expand_grid({"size": sizes}, "here")

    assert attributes(points, "name") == ["size=small", "size=large"]
    assert attributes(points, "settings") == [sizes["small"], sizes["large"]]


def test_tuning_runs_are_all_arms_at_all_points(study: Study) -> None:
    names = attributes(study.tuning_runs(), "name")

    assert len(names) == 2 * 3
    assert len(set(names)) == 2 * 3


def test_measuring_runs_are_all_arms_at_their_points_on_all_seeds(study: Study) -> None:
    gpt, angpt = study.arms
    selected = {"gpt": gpt.points[1], "angpt": angpt.points[0]}

    runs = study.measuring_runs(selected)

    names = [run.name.removesuffix(f"-{run.hash}") for run in runs]
    assert names == [
        "gpt_lr=0.2_seed=1",
        "angpt_lr=0.1_seed=1",
        "gpt_lr=0.2_seed=2",
        "angpt_lr=0.1_seed=2",
        "gpt_lr=0.2_seed=3",
        "angpt_lr=0.1_seed=3",
    ]
    assert runs[0].options(Path("x")) == [
        "--config",
        "gpt.yaml",
        "--config",
        "common.yaml",
        "--model.init_args.lr=0.2",
        "--seed_everything=1",
        "--data.init_args.seed=1",
        "--run_dir=x",
    ]


def test_a_name_follows_the_settings_and_the_content_of_the_files(
    study: Study, folder: Path
) -> None:
    config = folder / "common.yaml"
    text = config.read_text()
    name = study.tuning_runs()[0].name

    config.write_text("# a comment\n" + text)
    assert study.tuning_runs()[0].name == name

    config.write_text(text.replace("400", "401"))
    assert study.tuning_runs()[0].name != name


def test_a_budget_is_merged_over_the_study(folder: Path) -> None:
    cpu = {"seeds": [5], "arms": {"gpt": {"tune": None}, "angpt": None}}
    path = write_study(folder, budgets={"cpu": cpu, "1gpu": None})

    small = read_study(path, "cpu")
    full = read_study(path, "1gpu")

    assert attributes(small.arms, "name") == ["gpt"]
    assert small.tuning_runs() == []
    selected = {"gpt": small.arms[0].points[0]}
    assert len(small.measuring_runs(selected)) == 1
    assert len(full.tuning_runs()) == 6


@pytest.mark.parametrize("budget", [None, "8gpu"])
def test_a_budget_that_the_file_does_not_list_is_refused(folder: Path, budget: str | None) -> None:
    path = write_study(folder, budgets={"cpu": None, "1gpu": None})

    message = r"study\.yaml has the budgets cpu, 1gpu: choose one with --budget"
    with pytest.raises(UserError, match=message):
        read_study(path, budget)


def test_a_budget_of_a_file_without_budgets_is_refused(folder: Path) -> None:
    path = write_study(folder)

    with pytest.raises(UserError, match=r"study\.yaml has no budgets: leave --budget out"):
        read_study(path, "cpu")


def test_every_point_of_vary_is_an_arm(folder: Path) -> None:
    """Unequal tuning is allowed if the file says so."""
    arms = {
        "gpt": {"configs": ["gpt.yaml"], "vary": {"model.init_args.tau": [0.1, 10]}},
        "tuned": STUDY["arms"]["gpt"],
    }
    path = write_study(folder, arms=arms, baseline="gpt_tau=10", equal_tuning=False)

    study = read_study(path, None)

    first, second, _ = study.arms
    assert first.name == "gpt_tau=0.1"
    assert first.title == "gpt, tau 0.1"
    assert first.settings == {"model.init_args.tau": 0.1}
    assert second.name == "gpt_tau=10"
    assert second.title == "gpt, tau 10"
    assert second.settings == {"model.init_args.tau": 10}
    assert study.comparisons[0].baseline is second


def test_a_list_in_the_mapping_of_a_seed_makes_several_seeds(folder: Path) -> None:
    two_seeds = {"data.init_args.seed": [1, 2], "seed_everything": 3}
    path = write_study(folder, seeds=[7, two_seeds])

    study = read_study(path, None)

    assert attributes(study.seeds, "settings") == [
        {"seed_everything": 7, "data.init_args.seed": 7},
        {"seed_everything": 3, "data.init_args.seed": 1},
        {"seed_everything": 3, "data.init_args.seed": 2},
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": None}, "lists no arms"),
        (
            {"arms": {"gpt": {"configs": ["no.yaml"]}}},
            "configs of arm .gpt. in .*: no.yaml does not exist",
        ),
        (
            {"arms": {"gpt": {"config": "gpt.yaml"}}},
            "gpt of arms of study.yaml has the unknown key 'config'",
        ),
        (
            {"arms": {"gpt": ["gpt.yaml"]}},
            "study.yaml is not as docs/studies.md says: arms.gpt is list in place of dict",
        ),
        (
            {"arms": {"gpt": {"settings": {1: 2}}}},
            "arms.gpt.settings has the key 1, which is not a string: put it in",
        ),
        (
            {"arms": {"gpt": {"tune": {"lr": []}}}},
            "tune of arm 'gpt' in study.yaml has no values: leave it out",
        ),
        (
            {"arms": {"gpt": {"vary": [1]}}},
            "vary of arm 'gpt' in study.yaml .*its content is int in place of dict",
        ),
        (
            {"arms": {"gpt": {"tune": {"size": {"a": 1}}}}},
            "the choice 'a' of 'size' in tune of arm 'gpt' .* is int in",
        ),
        ({"seeds": 3}, "seeds is int in place of list"),
        (
            {"seeds": [1, 1]},
            "seeds of study.yaml has seed=1 and seed=1, which do not differ in seed_everything",
        ),
        (
            {"seeds": [{"initial_weights": "a"}, {"initial_weights": "b"}]},
            "initial_weights=a and initial_weights=b, which",
        ),
        (
            {"seeds": [2, {"seed_everything": 2, "data.seed": 2}]},
            "seed=2 and seed=2_seed_everything=2, which do not",
        ),
        ({"tuning_seeds": []}, "has grids to tune and no tuning_seeds: give"),
        (
            {"comparisons": [{"baseline": "gpt", "arms": 3}]},
            "an entry of comparisons.arms is int in place of list",
        ),
        (
            {"pace": {"flops_per_second": "fast"}},
            "pace.flops_per_second is str in place of int or float",
        ),
        (
            {"pace": {"flops_per_second": 0}},
            "pace.flops_per_second of study.yaml is 0: give a number above 0",
        ),
        (
            {"baseline": "lstm"},
            "baseline of study.yaml names 'lstm', which is none of its arms: choose among gpt",
        ),
        (
            {"comparisons": [{"baseline": "gpt", "arms": ["ngtp"]}]},
            "names 'ngtp', which is none of its arms",
        ),
        (
            {"arms": {"gpt": {"configs": ["gpt.yaml"]}, "a": {"title": "gpt"}}},
            "two arms with the name or title 'gpt'",
        ),
        (
            {"baseline": None, "arms": {"a": {"vary": {"tau": [1]}}, "a_tau=1": {"title": "b"}}},
            "two arms .* 'a_tau=1'",
        ),
        (
            {"baseline": None, "arms": {"a": {"vary": {"tau": [1]}}, "b": {"title": "a"}}},
            "two arms .* 'a'",
        ),
        ({"pace": {"flops": 1}}, "pace of study.yaml has the unknown key 'flops'"),
        (
            {"seeds": [], "arms": {"gpt": {"configs": ["gpt.yaml"]}}},
            "neither seeds nor anything to tune",
        ),
        (
            {"seeds": [1, {"seed_everything": 0}], "tuning_seeds": [0]},
            "measures on the seed .*0, on which it also tunes",
        ),
        (
            {"arms": arms_with(tune={"data.init_args.vocab_size": [512, 4096]})},
            r"tunes data\.vocab_size, and losses on other validation tokens do not compare: leave",
        ),
        (
            {"arms": arms_with(tune={"trainer.limit_val_batches": [8, 16]})},
            r"tunes trainer\.limit_val_batches, and losses on other validation tokens do not",
        ),
        (
            {"arms": STUDY["arms"] | {"ngpt": {"configs": ["gpt.yaml"]}}},
            "gpt 3, angpt 3, ngpt 1.*equal_tuning: false",
        ),
    ],
)
def test_mistakes_in_the_file_are_refused(folder: Path, changes: dict, message: str) -> None:
    path = write_study(folder, **changes)

    with pytest.raises(UserError, match=message):
        read_study(path, None)


def test_the_estimate_has_tokens_and_hours(folder: Path) -> None:
    pace = {"flops_per_second": 1e10, "measured": "here"}
    study = changed_study(folder, pace=pace)

    cost = estimate_cost(study.tuning_runs()[0])
    text = describe_plan(study, 2, {}, {})

    head = 1024 * 128
    linear = 4 * (4 * 128**2 + 12 * 128**2) + head
    attention = 4 * 128 * 257
    assert cost.tokens == 400 * TOKENS_PER_STEP
    assert cost.parameters == linear + head
    assert cost.flops == cost.tokens * 6 * (linear + attention)
    seconds_of_a_run = cost.flops / 1e10 + 10
    hours = (6 + 6) * seconds_of_a_run / 3600 / 2
    assert f"estimate: {hours:.2f} h with --jobs 2" in text
    assert "tuning: 6 runs, 4,915,200 tokens" in text
    assert "gpt: 3 settings × 1 tuning seeds, the best on 3 seeds" in text


def test_the_estimate_counts_no_run_that_has_ended(folder: Path) -> None:
    study = changed_study(folder, pace={"flops_per_second": 1e10})
    first, *others = study.tuning_runs()
    ended = {run.name: "finished" for run in others} | {first.name: "failed"}

    tuning, measuring = describe_plan(study, 2, {}, ended).splitlines()[-3:-1]

    assert tuning == "tuning: 0 runs, 0 tokens (of 6: 1 failed, 5 finished)"
    assert measuring.startswith("measuring: 6 runs, 4,915,200 tokens, about ")


def cost_with(folder: Path, settings: dict, *files: str) -> Cost:
    """The cost of a run with settings and further configuration files."""
    study = changed_study(folder, shared=shared_with(settings, *files))
    run, *_ = study.tuning_runs()
    return estimate_cost(run)


RAMP = "anlit.training.callbacks.BatchRamp"
SCHEDULE = {0: 1, 100: 4}
TOKENS_OF_SCHEDULE = (100 * 1 + 300 * 4) * TOKENS_PER_STEP


def test_the_estimate_counts_a_ramp_of_the_batch(folder: Path) -> None:
    ramp = {"class_path": RAMP, "init_args": {"schedule": SCHEDULE}}
    settings = {"trainer.accumulate_grad_batches": 4, "trainer.callbacks": [ramp]}

    cost = cost_with(folder, settings)

    assert cost.tokens == TOKENS_OF_SCHEDULE


def test_the_estimate_adds_the_callbacks_of_all_files(folder: Path) -> None:
    """The file of the ramp has steps at 1000 and 3000."""
    files = ["trainer/batch_ramp.yaml", "trainer/ema.yaml"]

    cost = cost_with(folder, {"trainer.max_steps": 3500}, *files)

    n_micro_batches = 1000 * 1 + 2000 * 2 + 500 * 4
    assert cost.tokens == n_micro_batches * TOKENS_PER_STEP


@pytest.mark.parametrize(
    "key", ["trainer.callbacks.schedule", "trainer.callbacks.init_args.schedule"]
)
def test_the_estimate_counts_a_ramp_that_an_option_changes(folder: Path, key: str) -> None:
    """The option changes the last callback, over the steps of its file."""
    files = ["trainer/ema.yaml", "trainer/batch_ramp.yaml"]

    cost = cost_with(folder, {key: SCHEDULE}, *files)

    assert cost.tokens == TOKENS_OF_SCHEDULE


def test_the_estimate_counts_a_ramp_whose_callback_is_a_name(folder: Path) -> None:
    settings = {
        "trainer.accumulate_grad_batches": 4,
        "trainer.callbacks": [RAMP],
        "trainer.callbacks.schedule": SCHEDULE,
    }

    cost = cost_with(folder, settings)

    assert cost.tokens == TOKENS_OF_SCHEDULE


@pytest.mark.parametrize("max_tokens", ["2M", 2_000_000])
def test_the_estimate_takes_a_number_of_tokens(folder: Path, max_tokens: object) -> None:
    cost = cost_with(folder, {"trainer.max_steps": -1, "max_tokens": max_tokens})

    assert cost.tokens == 2_000_000


def test_the_estimate_takes_a_number_of_tokens_per_parameter(folder: Path) -> None:
    cost = cost_with(folder, {"trainer.max_steps": -1, "tokens_per_parameter": 20})

    assert cost.tokens == 20 * cost.parameters


def test_a_name_and_tags_change_no_hash(folder: Path) -> None:
    runs_before = changed_study(folder).tuning_runs()
    hashes = attributes(runs_before, "hash")
    with Path("common.yaml").open("a") as file:
        file.write("\nname: wide\ntags: [a]\n")
    shared = shared_with({"tags": ["baseline"]})

    runs = changed_study(folder, shared=shared).tuning_runs()

    assert attributes(runs, "hash") == hashes
    assert '--tags=["baseline"]' in runs[0].options(Path("runs"))


@pytest.mark.parametrize(
    "changes",
    [
        {"shared": {"settings": {"name": "wide"}}},
        {
            "arms": {"gpt": {"configs": ["gpt.yaml"], "vary": {"name": ["a", "b"]}}},
            "baseline": None,
        },
        {"seeds": [{"seed_everything": 1, "name": "a"}]},
    ],
)
def test_a_name_among_the_settings_of_a_study_is_refused(folder: Path, changes: dict) -> None:
    message = (
        "study.yaml sets name, and a study names its runs by arm, point and seed: leave it out"
    )

    with pytest.raises(UserError, match=message):
        changed_study(folder, **changes)
