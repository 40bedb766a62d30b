"""Notes on what makes a comparison unfair."""

import math

import pytest

from anlit.compare.compare import compare
from anlit.compare.comparison import NOT_MEASURED
from tests.compare.conftest import FALLING, NGPT
from tests.compare.reports import H200, LR

OTHER_CONTENT = {"data": {"content_sha256": "c1", "tokenizer_sha256": "t0"}}
FLOAT8 = "model.init_args.runtime.float8"
CHANGED_AND_KILLED = [
    {"step": 4, "changed": ["lr 2 → 3", "tau 0 → 1"]},
    {"step": 6, "changed": ["lr 3 → 7"]},  # killed before it wrote a checkpoint
    {"step": 6, "changed": ["lr 3 → 5"]},
]
"""Launches of a run."""


def callback(name, **settings):
    """A single callback, as `--trainer.callbacks=NAME` writes it."""
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}


def notes_on(baseline, run, folder):
    return compare([str(baseline), str(run)], str(folder)).notes


@pytest.mark.usefixtures("no_plot")
def test_a_fair_comparison_has_no_note(make_run, tmp_path):
    run = make_run("fair", model=NGPT, settings={"trainer.precision": "32-true"})

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    assert notes == (NOT_MEASURED,)


@pytest.mark.usefixtures("no_plot")
def test_a_run_that_ends_above_the_loss_that_it_had_is_named(make_run, tmp_path):
    """A table shows its speed-up beside a final loss that is worse than the baseline's."""
    baseline = make_run("a", {100: 5.0, 200: 4.0, 300: 3.5})
    run = make_run("b", {100: 4.0, 200: 3.0, 300: 3.6}, model=NGPT)

    report = compare([str(baseline), str(run)], str(tmp_path / "o"))

    assert report.results[1].speedup.values == (300 / 150,)
    note = "1 of its 1 runs had the baseline's final loss and END ABOVE it"
    assert note in "\n".join(report.notes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("losses", "is_named"),
    [
        pytest.param({100: 4.0, 200: 3.0, 300: 3.4}, False, id="ends below"),
        pytest.param({100: 4.0, 200: 3.0, 300: 3.5}, False, id="ends at it"),
        pytest.param({100: 5.0, 200: 4.0, 300: 3.6}, False, id="never there"),
        pytest.param({100: 3.4, 200: 3.3, 300: 3.6}, True, id="there at the start"),
    ],
)
def test_only_a_run_that_had_the_loss_can_end_above_it(make_run, tmp_path, losses, is_named):
    baseline = make_run("a", {100: 5.0, 200: 4.0, 300: 3.5})

    notes = notes_on(baseline, make_run("b", losses, model=NGPT), tmp_path / "o")

    assert ("END ABOVE" in "\n".join(notes)) == is_named


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("model.init_args.context_length", 512, "context_length is 512, the baseline 256."),
        ("model.init_args.dropout", 0.5, "trained differently: dropout is 0.5"),
        (FLOAT8, "rowwise", "trained differently: float8 is rowwise, the baseline default."),
        (
            "data.init_args.batch_size",
            32,
            "trained differently: batch_size is 32, the baseline 16.",
        ),
        ("data.init_args.val_samples", 9, "validated differently: val_samples is 9"),
        ("trainer.val_check_interval", 50, "validated differently: val_check_interval is 50"),
        ("trainer.check_val_every_n_epoch", 2, "validated differently: check_val_every_n_epoch"),
        ("trainer.gradient_clip_val", 0.5, "trained differently: gradient_clip_val is 0.5"),
        ("trainer.precision", "bf16-true", "precision is bf16-true, the baseline 32-true."),
        ("initial_weights", "a.ckpt", "trained differently: initial_weights is True, the baseline"),
        ("initial_weights", "a.ckpt", "none; the tokens of EARLIER TRAINING are not counted."),
        (
            "trainer.callbacks",
            callback("EarlyStopping", patience=1),
            "trained differently: EarlyStopping is on, the baseline none.",
        ),
        (
            "trainer.callbacks",
            callback("GradientAccumulationScheduler", scheduling=4),
            "GradientAccumulationScheduler is on, the baseline none.",
        ),
        (LR, 0.01, "nGPT, plain: its own lr=0.01, the baseline's lr=0.001; fair only if both"),
    ],
)
def test_a_setting_that_makes_a_comparison_unfair_is_noted(make_run, tmp_path, key, value, note):
    settings = {"model.init_args.runtime": {"float8": None}, key: value}
    run = make_run("b", model=NGPT, settings=settings)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    assert note in "\n".join(notes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("record", "note"),
    [
        (OTHER_CONTENT, "other data: content is c1"),
        ({"data": None}, "not verified"),
        ({"stopped_early": "4 of 9 steps, by X"}, "b ended early, after 4 of 9 steps, by X."),
        ({"averaged_by": "TailAveraging"}, "validated with averaged weights (TailAveraging)."),
        (H200, "Hardware differs"),
        ({"git": {"commit": "f" * 40, "dirty": False}}, "different commits"),
        ({"git": {"commit": "f" * 40, "dirty": True}}, "uncommitted changes"),
        ({"versions": {"torch": "3"}}, "different versions"),
        ({"parameters": 2000}, "2,000 parameters, the baseline 1,000"),
        (
            {"launches": CHANGED_AND_KILLED},
            "b changed on the way: lr 2 → 3, tau 0 → 1 from step 4; lr 3 → 5 from step 6.",
        ),
    ],
)
def test_a_record_that_makes_a_comparison_unfair_is_noted(make_run, tmp_path, record, note):
    run = make_run("b", model=NGPT, record=record)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    assert note in "\n".join(notes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("fingerprint", [None, "c0"])
def test_a_users_data_with_other_settings_are_the_same_data_by_fingerprint_only(
    make_run, tmp_path, fingerprint
):
    record = {"data": {"class": "mine.Pairs", "content_sha256": fingerprint}}
    settings = {"data.class_path": "mine.Pairs"}
    baseline = make_run("a", record=record, settings=settings)
    changed = settings | {"data.init_args.val_samples": 9}
    run = make_run("b", model=NGPT, record=record, settings=changed)

    notes = "\n".join(notes_on(baseline, run, tmp_path / "o"))

    is_unknown = "validated on data that may be other data: mine.Pairs gives no" in notes
    assert is_unknown == (fingerprint is None)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("options", "note"),
    [
        pytest.param(
            {"losses": {100: 5.0, 800: 2.0}},
            "800 training tokens, the baseline 400",
            id="longer",
        ),
        pytest.param(
            {"seed": 2},
            "no seed in common with the baseline, so its speed-up is over the baseline's mean",
            id="another seed",
        ),
        pytest.param(
            {"losses": {100: 9.0, 400: 8.5}},
            "b: DIVERGED in effect, its final loss is above that of guessing, 6.9.",
            id="worse than guessing",
        ),
    ],
)
def test_a_course_that_makes_a_comparison_unfair_is_noted(make_run, tmp_path, options, note):
    run = make_run("b", model=NGPT, **options)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    assert note in "\n".join(notes)


SCALE_INVARIANT = {"class_path": "anlit.ScaleInvariant", "init_args": {}}
LAYERS = "model.init_args.n_layers"
ATTENTION = "model.init_args.attention"


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("settings", "note"),
    [
        pytest.param({LR: 0.01}, "ours: its own lr=0.01, the baseline's lr=0.001", id="tuning"),
        pytest.param(
            {LAYERS: 4}, "ours: another model, n_layers=4; the baseline has n_layers=2.", id="model"
        ),
        pytest.param(
            {ATTENTION: SCALE_INVARIANT},
            "ours: another model, attention=ScaleInvariant; the baseline has attention=Plain.",
            id="attention",
        ),
    ],
)
def test_a_setting_that_a_name_hides_is_noted(make_run, tmp_path, settings, note):
    baseline = make_run("a", settings={LAYERS: 2}, record={"name": "base"})
    run = make_run("b", settings={LAYERS: 2} | settings, record={"name": "ours"})

    notes = compare([str(baseline), str(run)], str(tmp_path / "o"), baseline="base").notes

    assert note in "\n".join(notes)


@pytest.mark.usefixtures("no_plot")
def test_layers_that_the_architecture_hides_are_noted(make_run, tmp_path):
    baseline = make_run("a", settings={LAYERS: 2})
    run = make_run("b", model=NGPT, settings={LAYERS: 4, "model.init_args.s_qk_init": 1.0})

    notes = notes_on(baseline, run, tmp_path / "o")

    note = "nGPT, plain: another model, n_layers=4; the baseline has n_layers=2."
    assert note in notes


@pytest.mark.usefixtures("no_plot")
def test_a_note_on_the_model_leaves_out_what_the_labels_show(make_run, tmp_path):
    """The demo's anGPT with scale-invariant attention has p-RoPE too."""
    positions = {"model.init_args.positions": {"class_path": "anlit.NoPE"}}
    run = make_run("b", model=NGPT, settings={ATTENTION: SCALE_INVARIANT} | positions)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    difference = "positions=no positions; the baseline has positions=RoPE."
    note = f"nGPT, scale-invariant: another model, {difference}"
    assert note in notes


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({LR: 0.01}, id="tuning"),
        pytest.param({LAYERS: 4}, id="model"),
        pytest.param({ATTENTION: SCALE_INVARIANT}, id="attention"),
        pytest.param({"model.init_args.positions": {"class_path": "anlit.NoPE"}}, id="a class"),
    ],
)
def test_a_setting_that_the_labels_show_needs_no_note(make_run, tmp_path, settings):
    baseline = make_run("a", settings={LAYERS: 2})
    run = make_run("b", settings={LAYERS: 2} | settings)

    notes = compare([str(baseline), str(run)], str(tmp_path / "o"), baseline=str(baseline)).notes

    assert notes == (NOT_MEASURED,)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("losses", "note"),
    [
        pytest.param({100: 3.5, 200: 2.5, 300: 3.5, 400: 2.5}, "speed-up is 1.14.", id="twice"),
        pytest.param({100: 3.5, 200: 2.5, 300: 2.7, 400: 2.5}, "", id="a rise below the loss"),
        pytest.param({100: 2.5, 200: 3.5, 400: 2.5}, "speed-up is 1.33.", id="from the start"),
    ],
)
def test_a_loss_that_is_reached_twice_is_noted(make_run, tmp_path, losses, note):
    """The first crossing may be an accident of a noisy curve."""
    run = make_run("b", losses, model=NGPT)

    notes = "\n".join(notes_on(make_run("a"), run, tmp_path / "o"))

    assert ("RISES ABOVE" in notes) == bool(note)
    assert note in notes


@pytest.mark.usefixtures("no_plot")
def test_seeds_that_only_the_baseline_has_are_noted(make_run, tmp_path):
    """A seed that was never trained, or whose folder is gone, is not among the failed runs."""
    for seed in (1, 2, 3):
        make_run(f"a{seed}", seed=seed)
    make_run("b", model=NGPT, seed=2)

    notes = compare([str(tmp_path / "runs")], str(tmp_path / "o")).notes

    note = "nGPT, plain: lacks 2 of the baseline's seeds; its speed-up is of 1 common seed"
    assert note in "\n".join(notes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        pytest.param({LR: 0.01}, True, id="rate"),
        pytest.param({LR: 0.01, LAYERS: 4}, False, id="another model"),
    ],
)
def test_a_named_baseline_with_a_better_tuned_twin_is_noted(make_run, tmp_path, settings, is_noted):
    baseline = make_run("a", settings={LAYERS: 2})
    better = {tokens: loss - 0.5 for tokens, loss in FALLING.items()}
    make_run("b", better, settings={LAYERS: 2} | settings)

    notes = compare([str(tmp_path / "runs")], str(tmp_path / "o"), str(baseline)).notes

    assert (
        any("ends LOWER, at 2.5000, the baseline at 3.0000" in note for note in notes) == is_noted
    )


@pytest.mark.usefixtures("no_plot")
def test_losses_that_are_left_out_of_a_curve_are_noted(make_run, tmp_path):
    losses = {100: 5.0, 200: math.nan, 300: math.inf, 400: 2.9}
    run = make_run("b", losses, model=NGPT)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    note = f"{run}: 2 of its 4 validation losses are NaN or infinite; its curve is a line across"
    assert note in "\n".join(notes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("losses", "note"),
    [
        pytest.param({200: 4.0, 400: 2.0}, "between 1.00 and 2.00; lines give", id="far apart"),
        pytest.param({200: 4.0, 320: 3.2, 400: 2.8}, "", id="near"),
        pytest.param({100: 4.0, 300: 3.0, 400: 2.0}, "", id="at a validation"),
        pytest.param({200: 2.9, 400: 2.0}, "", id="a bound"),
        pytest.param({200: 4.0, 400: 3.1}, "", id="not reached"),
    ],
)
def test_a_crossing_between_distant_validations_is_noted(make_run, tmp_path, losses, note):
    """The line between them is not where the curve was."""
    run = make_run("b", losses, model=NGPT)

    notes = "\n".join(notes_on(make_run("a"), run, tmp_path / "o"))

    assert ("far apart" in notes) == bool(note)
    assert note in notes


@pytest.mark.usefixtures("no_plot")
def test_tuning_runs_in_the_folder_of_a_study_are_noted(make_run, tmp_path):
    """Unless nothing was tuned, or the runs are named, so that the user has chosen them."""
    study = make_run("a").parent
    run = make_run("b", model=NGPT)
    (study / "report.json").write_text('{"tuning": {}}')
    assert compare([str(study)], str(tmp_path / "o")).notes == (NOT_MEASURED,)
    (study / "report.json").write_text('{"tuning": {"gpt": [{"setting": {"lr": 1}, "loss": 3}]}}')

    by_folder = compare([str(study)], str(tmp_path / "o")).notes

    assert by_folder[0].startswith(f"{study}: the folder of a study, whose TUNING RUNS count")
    assert notes_on(study / "a", run, tmp_path / "o") == (NOT_MEASURED,)
