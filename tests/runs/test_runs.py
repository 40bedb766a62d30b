"""Reading run folders, whole and broken, and grouping them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.config.labels import attention_label
from anlit.errors import UserError
from anlit.runs.folders import find_runs, hardware_label, load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import ANGPT

MakeRun = Callable[..., Path]

ATTENTION = "model.init_args.attention"
CALLBACKS = "trainer.callbacks"
D_MODEL = "model.init_args.d_model"
LR = "model.init_args.optimizer.init_args.lr"
OPTIMIZER = "model.init_args.optimizer"
POSITIONS = "model.init_args.positions"

SCALE_INVARIANT = {
    "class_path": "anlit.nn.mechanisms.ScaleInvariant",
    "init_args": {"tau": 10},
}
PLAIN = {"class_path": "anlit.nn.mechanisms.Plain", "init_args": {}}
WINDOW = {
    "class_path": "SlidingWindow",
    "init_args": {"width": 8, "mechanism": SCALE_INVARIANT},
}
PATTERN = {
    "class_path": "anlit.AttentionPattern",
    "init_args": {"layers": [WINDOW, {"class_path": "anlit.SqrtLogN"}]},
}


def labels(*folders: Path) -> list[str]:
    groups = group_runs(map(load_run, folders))
    return [group.label for group in groups]


def test_a_run_is_read(make_run: MakeRun) -> None:
    folder = make_run("a", model=ANGPT, seed=7, settings={ATTENTION: SCALE_INVARIANT})

    run = load_run(folder)

    assert run.architecture == "anGPT"
    assert run.attention == "scale-invariant"
    assert run.seed == 7
    assert run.status == "finished"
    assert run.curve.tokens.tolist() == [100, 200, 300, 400]
    assert run.curve.seconds.tolist() == pytest.approx([10, 20, 30, 40])
    assert run.curve.loss.tolist() == [5.0, 4.0, 3.5, 3.0]
    assert run.bits_per_byte == pytest.approx(1.0)
    assert run.content_hash == "c0"
    assert run.tokenizer_hash == "t0"
    assert run.commit == "0123456789"


def test_a_resumed_run_keeps_the_last_row_of_a_step_and_drops_what_it_undid(
    make_run: MakeRun,
) -> None:
    folder = make_run("a", {100: 5.0, 200: 4.5, 300: 9.0, 350: 9.0})
    resumed = make_run("b", {200: 4.0, 400: 3.0})
    _, *later_rows = (resumed / "metrics.csv").read_text().splitlines(keepends=True)
    with (folder / "metrics.csv").open("a") as file:
        file.writelines(later_rows)

    curve = load_run(folder).curve

    assert curve.tokens.tolist() == [100, 200, 400]
    assert curve.loss.tolist() == [5.0, 4.0, 3.0]


def test_nan_in_the_middle_is_skipped(make_run: MakeRun) -> None:
    losses = {100: 5.0, 200: math.nan, 300: 4.0}

    run = load_run(make_run("spike", losses))

    assert run.comparable
    assert run.curve.finite().tokens.tolist() == [100, 300]


def test_nan_at_the_end_is_divergence(make_run: MakeRun) -> None:
    run = load_run(make_run("lost", {100: 5.0, 200: math.nan}))

    assert run.state == "finished, diverged"
    assert not run.comparable


def test_an_empty_record_and_a_torn_last_line_are_survived(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder / "run.json").write_text("{}")
    with (folder / "metrics.csv").open("a") as file:
        file.write("50,")

    run = load_run(folder)

    assert run.status == "unknown"
    assert run.commit is None
    assert run.hardware is None
    assert run.content_hash is None
    assert len(run.curve) == 4


def test_missing_metrics_are_survived(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder / "metrics.csv").unlink()

    assert load_run(folder).state == "finished, no validation"


def test_run_folders_are_found_below_a_parent_and_each_once(
    make_run: MakeRun, tmp_path: Path
) -> None:
    deep = make_run("x/deep/b")
    make_run("a")

    folders = find_runs([str(tmp_path), str(deep)])

    assert [folder.name for folder in folders] == ["a", "b"]


def test_a_run_on_another_disk_is_found_by_its_link(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run")
    runs = run.parent
    scratch = make_run("trained-there").rename(tmp_path / "scratch")
    (runs / "a-link-to-run").symlink_to(run)
    (runs / "elsewhere").symlink_to(scratch)
    (runs / "circle").symlink_to(runs)

    assert find_runs([str(runs)]) == [run, runs / "elsewhere"]


def test_a_path_without_runs_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    checkpoints = make_run("a") / "checkpoints"
    checkpoints.mkdir()

    with pytest.raises(UserError, match="is not a folder"):
        find_runs([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no run folder"):
        find_runs([str(checkpoints)])


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (None, "plain"),
        (PLAIN, "plain"),
        ({"class_path": "anlit.ALiBi"}, "ALiBi"),
        ({"class_path": "LogN"}, "LogN"),
        ([SCALE_INVARIANT, None, SCALE_INVARIANT], "scale-invariant + plain"),
        (PATTERN, "scale-invariant in a window of 8 + SqrtLogN"),
    ],
)
def test_attention_labels(spec: Any, label: str) -> None:
    assert attention_label(spec) == label


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.logger", False),
        ("trainer.max_time", "00:01:00:00"),
        ("trainer.deterministic", True),
        ("trainer.callbacks", [{"class_path": "anlit.training.callbacks.TrainingDynamics"}]),
        ("trainer.callbacks", [{"class_path": "anlit.Samples"}]),
        ("trainer.callbacks", [{"class_path": "lightning.pytorch.callbacks.timer.Timer"}]),
        ("data.init_args.path", "elsewhere"),
        ("data.init_args.source", "texts"),
        ("data.init_args.paths", {"a": "elsewhere/a"}),
        ("data.init_args.raw_dir", "elsewhere"),
        ("model.init_args.kernel", "eager"),
        ("model.init_args.backend", "eager"),
        (ATTENTION, PLAIN),
        ("ckpt_path", "x"),
    ],
)
def test_execution_paths_and_plain_attention_do_not_separate_runs(
    make_run: MakeRun, key: str, value: Any
) -> None:
    first = load_run(make_run("a"))
    second = load_run(make_run("b", seed=2, settings={key: value}))

    (group,) = group_runs([first, second])

    assert group.label == "GPT+, plain"
    assert [run.seed for run in group.counted] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "label", "other_label"),
    [
        pytest.param({LR: 0.005}, "lr=0.001", "lr=0.005", id="a number"),
        pytest.param(
            {LR: None, "trainer.max_steps": None},
            "lr=0.001, max_steps=1000",
            "lr=default, max_steps=none",
            id="null",
        ),
        pytest.param(
            {POSITIONS: {"class_path": "anlit.nn.layers.positions.NoPE"}},
            "RoPE",
            "no positions",
            id="a class",
        ),
    ],
)
def test_settings_separate_runs_and_labels_tell_how(
    make_run: MakeRun, settings: dict[str, Any], label: str, other_label: str
) -> None:
    names = labels(make_run("a"), make_run("b", settings=settings))

    assert names == [f"GPT+, plain, {label}", f"GPT+, plain, {other_label}"]


def begun(path: str, identity: str) -> dict[str, Any]:
    return {"settings": {"initial_weights": path}, "record": {"begun_from": identity}}


def test_a_label_names_the_first_weights(make_run: MakeRun) -> None:
    """Their digits stay in the settings, which tell groups apart."""
    names = labels(
        make_run("a1", **begun("runs/base-s1", "0123456789ab")),
        make_run("a2", **begun("runs/base-s2", "0123456789ab"), seed=2),
        make_run("b", **begun("runs/wide/checkpoints/last.ckpt", "ba9876543210")),
        make_run("c"),
    )

    assert names == [
        "GPT+, plain, initial_weights=base",
        "GPT+, plain, initial_weights=wide/last",
        "GPT+, plain, initial_weights=none",
    ]


def test_first_weights_of_the_same_name_are_told_apart_by_their_digits(make_run: MakeRun) -> None:
    names = labels(
        make_run("a", **begun("here/base", "0123456789ab")),
        make_run("b", **begun("there/base", "ba9876543210")),
    )

    assert names == [
        "GPT+, plain, initial_weights=0123456789ab",
        "GPT+, plain, initial_weights=ba9876543210",
    ]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["wide", "wide"], "wide"),
        (["gpt-1", "gpt-2"], "gpt"),
        (["gpt-wide", "gpt-wide-2"], "gpt-wide"),
        (["gpt-1", "gpt-10"], "gpt"),
        (["a_b.c", "a_b.d"], "a_b"),
        (["gpt1", "gpt2"], "GPT+, plain"),
        (["s1-gpt", "s2-gpt"], "GPT+, plain"),
        (["wide", None], "GPT+, plain"),
    ],
)
def test_a_label_is_the_name_that_all_seeds_share(
    make_run: MakeRun, names: list[str | None], label: str
) -> None:
    folders = []
    for seed, name in enumerate(names, 1):
        folders.append(make_run(f"run{seed}", seed=seed, record={"name": name}))

    assert labels(*folders) == [label]


def averaged(decay: float) -> dict[str, Any]:
    """A callback as config.yaml has it, with all its arguments."""
    return {
        "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
        "init_args": {
            "device": None,
            "use_buffers": True,
            "decay": decay,
            "update_every_n_steps": 1,
        },
    }


def test_labels_tell_the_arguments_of_callbacks_that_differ(make_run: MakeRun) -> None:
    ramp = {
        "class_path": "anlit.training.callbacks.BatchRamp",
        "init_args": {"schedule": {"0": 1, "8": 2}},
    }
    slow = make_run("a", settings={CALLBACKS: [ramp, averaged(0.99)]})
    fast = make_run("b", settings={CALLBACKS: [ramp, averaged(0.9)]})
    alone = make_run("c", settings={CALLBACKS: [ramp]})

    assert labels(slow, fast) == ["GPT+, plain, decay=0.99", "GPT+, plain, decay=0.9"]
    assert labels(slow, alone) == [
        "GPT+, plain, EMAWeightAveraging=on",
        "GPT+, plain, EMAWeightAveraging=none",
    ]


def test_two_callbacks_of_one_class_are_told_apart(make_run: MakeRun) -> None:
    both = make_run("a", settings={CALLBACKS: [averaged(0.9), averaged(0.99)]})
    first = make_run("b", settings={CALLBACKS: [averaged(0.9)]})

    label_of_both, label_of_first = labels(both, first)

    assert label_of_both != label_of_first


def test_a_name_separates_no_runs_and_two_configurations_of_a_name_are_told_apart(
    make_run: MakeRun,
) -> None:
    slow = make_run("a", record={"name": "wide"})
    fast = make_run("b", record={"name": "wide"}, settings={LR: 0.005})
    unnamed = make_run("c", model=ANGPT)

    assert labels(slow, fast, unnamed) == ["wide, lr=0.001", "wide, lr=0.005", "anGPT, plain"]


def test_the_options_name_and_tags_are_no_settings(make_run: MakeRun) -> None:
    unnamed = load_run(make_run("a"))
    named = load_run(make_run("b", seed=2, settings={"name": "wide", "tags": ["a"]}))

    (group,) = group_runs([unnamed, named])

    assert "name" not in group.settings
    assert "tags" not in group.settings


def test_data_separate_runs_and_labels_tell_how(make_run: MakeRun) -> None:
    other_data = {"content_sha256": "c1", "tokenizer_sha256": "t0"}

    names = labels(make_run("a"), make_run("b", record={"data": other_data}))

    assert names == ["GPT+, plain, content=c0", "GPT+, plain, content=c1"]


def test_many_settings_that_differ_give_distinct_labels(make_run: MakeRun) -> None:
    many = {f"model.init_args.{name}": 1 for name in "abcde"}
    few_settings = make_run("a")
    many_settings = make_run("b", settings=many)
    more_settings = make_run("c", settings=many | {LR: 1.0})

    names = labels(few_settings, many_settings, more_settings)

    assert len(set(names)) == 3


def test_unfinished_runs_count_only_where_nothing_finished(make_run: MakeRun) -> None:
    first_losses = {100: 5.0, 200: 4.0}
    running = load_run(make_run("a", first_losses, record={"status": "running"}))
    finished = load_run(make_run("b", seed=2))
    failed = load_run(make_run("c", {}, seed=3, record={"status": "failed"}))

    (with_finished,) = group_runs([running, finished, failed])
    (without_finished,) = group_runs([running, failed])

    assert with_finished.counted == (finished,)
    assert not with_finished.unfinished
    assert without_finished.counted == (running,)
    assert without_finished.unfinished


def test_an_interrupted_run_is_not_complete(make_run: MakeRun) -> None:
    assert not load_run(make_run("d", record={"status": "interrupted"})).complete


def test_labels_of_two_sizes_at_two_rates_hold_size_and_rate(make_run: MakeRun) -> None:
    """Also where many other settings follow the size."""
    folders = []
    for size in (32, 64):
        for rate in (0.001, 0.002):
            settings = {LR: rate}
            for name in ("a", "b", "d_ff", "d_model", "n_heads"):
                settings[f"model.init_args.{name}"] = size
            folders.append(make_run(f"{size}-{rate}", settings=settings))

    names = labels(*folders)

    assert len(set(names)) == 4
    for label, folder in zip(names, folders, strict=True):
        size, rate = folder.name.split("-")
        assert f"lr={rate}" in label
        assert f"={size}" in label


def test_rates_of_one_optimizer_are_told_apart_beside_another_optimizer(make_run: MakeRun) -> None:
    muon = {"class_path": "anlit.MuonAdamW", "init_args": {"momentum": 0.95}}

    slow, fast, with_muon = labels(
        make_run("slow", settings={LR: 0.001}),
        make_run("fast", settings={LR: 0.005}),
        make_run("muon", settings={OPTIMIZER: muon}),
    )

    assert slow.endswith("lr=0.001")
    assert fast.endswith("lr=0.005")
    assert "MuonAdamW" in with_muon


@pytest.mark.parametrize(
    ("key", "values"),
    [
        pytest.param(LR, [0.001, 0.00100000001], id="the same when rounded"),
        pytest.param(D_MODEL, ["x" * 60 + "a", "x" * 60 + "b"], id="the same when cut"),
    ],
)
def test_values_that_look_the_same_are_told_apart_by_their_folders(
    make_run: MakeRun, key: str, values: list[Any]
) -> None:
    folders = []
    for name, value in zip("ab", values, strict=True):
        folders.append(make_run(f"{name}/run", settings={key: value}))

    assert labels(*folders) == ["GPT+, plain, a/run", "GPT+, plain, b/run"]


def test_more_settings_than_a_label_holds_give_the_names_of_folders(make_run: MakeRun) -> None:
    folders = [make_run("none")]
    for name in "abcde":
        folders.append(make_run(name, settings={f"model.init_args.{name}": 1}))

    names = labels(*folders)

    assert names[1] == "GPT+, plain, a"
    assert len(set(names)) == 6


def test_the_hardware_of_a_thousand_devices_is_a_short_name() -> None:
    nodes = ["NVIDIA H100"] * 1016 + ["NVIDIA H200"] * 8
    launches = [{"hardware": {"devices": nodes}}, {"hardware": {"devices": ["NVIDIA H100"]}}]

    labels = [hardware_label(launch) for launch in launches]

    assert labels == ["1,016 × NVIDIA H100, 8 × NVIDIA H200", "NVIDIA H100"]
