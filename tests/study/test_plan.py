"""A study's YAML becomes runs: grids, budgets, seeds, equal tuning, names that follow from the settings."""

from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.study.estimate import describe_plan, estimate_cost
from anlit.study.grid import expand_grid
from anlit.study.plan import Study
from anlit.study.read_study import read_study
from tests.study.conftest import STUDY, write_study


def test_a_grid_is_its_product_a_list_their_union_and_a_choice_changes_several_settings() -> None:
    points = expand_grid(
        [{"m.lr": [0.1, 0.2], "m.depth": [1, 2]}, {"m.lr": 0.1, "m.depth": 2}], "here"
    )
    names = ["depth=1_lr=0.1", "depth=1_lr=0.2", "depth=2_lr=0.1", "depth=2_lr=0.2"]
    assert sorted(point.name for point in points) == names
    alike = expand_grid([{"m.first.lr": [1], "m.second.lr": [2]}, {"m.second.lr": 2}], "here")
    assert [point.shown for point in alike] == [{"first.lr": 1, "second.lr": 2}, {"second.lr": 2}]
    choices = expand_grid(
        {"size": {"small": {"m.d": 1, "m.h": 1}, "large": {"m.d": 2, "m.h": 2}}}, "here"
    )
    named = {point.name: point.settings for point in choices}
    assert named == {"size=small": {"m.d": 1, "m.h": 1}, "size=large": {"m.d": 2, "m.h": 2}}


def test_tuning_and_measuring_are_all_arms_at_all_points_and_seeds(study: Study) -> None:
    assert len({run.name for run in study.tuning_runs()}) == 2 * 3 == len(study.tuning_runs())
    best = {"gpt": study.arms[0].points[1], "angpt": study.arms[1].points[0]}
    measured = study.measuring_runs(best)
    names = [
        f"{arm}_lr={lr}_seed={seed}"
        for seed in (1, 2, 3)
        for arm, lr in (("gpt", 0.2), ("angpt", 0.1))
    ]
    assert [run.name.rsplit("-", 1)[0] for run in measured] == names
    assert measured[0].options(Path("x")) == [
        "--config", "gpt.yaml", "--config", "common.yaml", "--model.init_args.lr=0.2", "--seed_everything=1",
        "--data.init_args.seed=1", "--run_dir=x",
    ]  # fmt: skip


def test_a_name_follows_the_settings_and_the_content_of_the_files(
    study: Study, folder: Path
) -> None:
    name = study.tuning_runs()[0].name
    (folder / "common.yaml").write_text("# a comment\n" + (folder / "common.yaml").read_text())
    assert study.tuning_runs()[0].name == name
    (folder / "common.yaml").write_text((folder / "common.yaml").read_text().replace("400", "401"))
    assert study.tuning_runs()[0].name != name


def test_a_budget_is_merged_over_the_study(folder: Path) -> None:
    cpu = {"seeds": [5], "arms": {"gpt": {"tune": None}, "angpt": None}}
    path = write_study(folder, budgets={"cpu": cpu, "1gpu": None})
    small = read_study(path, "cpu")
    assert ([arm.name for arm in small.arms], small.tuning_runs()) == (["gpt"], [])
    assert len(small.measuring_runs({"gpt": small.arms[0].points[0]})) == 1
    assert len(read_study(path, "1gpu").tuning_runs()) == 6
    for budget in (None, "8gpu"):
        with pytest.raises(
            UserError, match=r"study\.yaml has the budgets cpu, 1gpu: choose one with --budget"
        ):
            read_study(path, budget)


def test_what_varies_are_arms_of_their_own(folder: Path) -> None:
    """And unequal tuning is allowed where it is said."""
    arms = {
        "gpt": {"configs": ["gpt.yaml"], "vary": {"model.init_args.tau": [0.1, 10]}},
        "tuned": STUDY["arms"]["gpt"],
    }
    study = read_study(
        write_study(folder, arms=arms, baseline="gpt_tau=10", equal_tuning=False), None
    )
    assert [(arm.name, arm.title, arm.settings) for arm in study.arms[:2]] == [
        ("gpt_tau=0.1", "gpt, tau 0.1", {"model.init_args.tau": 0.1}),
        ("gpt_tau=10", "gpt, tau 10", {"model.init_args.tau": 10}),
    ]
    assert study.comparisons[0].baseline is study.arms[1]


def test_lists_in_a_seeds_mapping_are_seeds_of_their_own(folder: Path) -> None:
    key = "data.init_args.seed"
    study = read_study(write_study(folder, seeds=[7, {key: [1, 2], "seed_everything": 3}]), None)
    assert [seed.settings.get(key) for seed in study.seeds] == [7, 1, 2]
    assert [seed.settings["seed_everything"] for seed in study.seeds] == [7, 3, 3]


@pytest.mark.parametrize(("changes", "words"), [
    ({"arms": None}, "lists no arms"),
    ({"arms": {"gpt": {"configs": ["no.yaml"]}}}, "configs of arm .gpt. in .*: no.yaml does not exist"),
    ({"arms": {"gpt": {"config": "gpt.yaml"}}}, "arm 'gpt' of study.yaml has the unknown key 'config'"),
    ({"arms": {"gpt": ["gpt.yaml"]}}, "study.yaml is not as docs/studies.md says: arms.gpt is list in place of dict"),
    ({"arms": {"gpt": {"settings": {1: 2}}}}, "arms.gpt.settings has the key 1, which is no string: put it in quotes"),
    ({"arms": {"gpt": {"tune": {"lr": []}}}}, "tune of arm 'gpt' in study.yaml has no values: leave it out"),
    ({"arms": {"gpt": {"vary": [1]}}}, "vary of arm 'gpt' in study.yaml .*its content is int in place of dict"),
    ({"arms": {"gpt": {"tune": {"size": {"a": 1}}}}}, "the choice 'a' of 'size' in tune of arm 'gpt' .* is int in"),
    ({"seeds": 3}, "seeds is int in place of list"),
    ({"seeds": [1, 1]}, "seeds of study.yaml has seed=1 and seed=1, which do not differ in seed_everything"),
    ({"seeds": [{"initial_weights": "a"}, {"initial_weights": "b"}]}, "initial_weights=a and initial_weights=b, which"),
    ({"seeds": [2, {"seed_everything": 2, "data.seed": 2}]}, "seed=2 and seed=2_seed_everything=2, which do not"),
    ({"tuning_seeds": []}, "has grids to tune and no tuning_seeds: give"),
    ({"comparisons": [{"baseline": "gpt", "arms": 3}]}, "an entry of comparisons.arms is int in place of list"),
    ({"pace": {"flops_per_second": "fast"}}, "pace.flops_per_second is str in place of int or float"),
    ({"pace": {"flops_per_second": 0}}, "pace.flops_per_second of study.yaml is 0: give a number above 0"),
    ({"baseline": "lstm"}, "baseline of study.yaml names 'lstm', which is none of its arms: choose among gpt, angpt"),
    ({"comparisons": [{"baseline": "gpt", "arms": ["ngtp"]}]}, "names 'ngtp', which is none of its arms"),
    ({"arms": {"gpt": {"configs": ["gpt.yaml"]}, "a": {"title": "gpt"}}}, "two arms with the name or title 'gpt'"),
    ({"baseline": None, "arms": {"a": {"vary": {"tau": [1]}}, "a_tau=1": {"title": "b"}}}, "two arms .* 'a_tau=1'"),
    ({"baseline": None, "arms": {"a": {"vary": {"tau": [1]}}, "b": {"title": "a"}}}, "two arms .* 'a'"),
    ({"pace": {"flops": 1}}, "pace of study.yaml has the unknown key 'flops'"),
    ({"seeds": [], "arms": {"gpt": {"configs": ["gpt.yaml"]}}}, "neither seeds nor anything to tune"),
    ({"seeds": [1, {"seed_everything": 0}], "tuning_seeds": [0]}, "measures on the seed .*0, on which it also tunes"),
    ({"arms": STUDY["arms"] | {"ngpt": {"configs": ["gpt.yaml"]}}}, "gpt 3, angpt 3, ngpt 1.*equal_tuning: false"),
])  # fmt: skip
def test_mistakes_in_the_file_are_told(folder: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_study(write_study(folder, **changes), None)


def test_the_estimate_counts_tokens_and_hours(folder: Path) -> None:
    study = read_study(
        write_study(folder, pace={"flops_per_second": 1e10, "measured": "here"}), None
    )
    cost = estimate_cost(study.tuning_runs()[0])
    linear = 4 * (4 * 128**2 + 12 * 128**2) + 1024 * 128
    assert cost.tokens == 400 * 8 * 256
    assert cost.parameters == linear + 1024 * 128
    assert cost.flops == cost.tokens * (6 * linear + 6 * 4 * 128 * 257)
    text = describe_plan(study, 2, {}, {})
    hours = (6 + 6) * (cost.flops / 1e10 + 10) / 3600 / 2
    assert f"estimate: {hours:.2f} h with --jobs 2" in text
    assert "tuning: 6 runs, 4,915,200 tokens" in text
    assert "gpt: 3 settings × 1 tuning seeds, the best on 3 seeds" in text
