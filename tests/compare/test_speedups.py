"""Speed-ups in tokens and in wall-clock, and the reasons to give none."""

import numpy as np
import pytest

from anlit.compare import plots
from tests.compare.conftest import ANGPT, FALLING, NGPT
from tests.compare.reports import FASTER, H200, SECOND, SLOWER, report_on_runs, write_paired

NGPT_TAKES_TWICE_AS_LONG = [[1.0] * 6, [2.0] * 6]
"""Seconds of a step of GPT+ and of nGPT, in six rounds."""
STANDS_STILL = {100: 5.0, 200: 3.0, 400: 3.0}


@pytest.fixture
def timed_in_turns(make_run, tmp_path):
    """A comparison of three runs. Their steps were timed in turns.

    The runs took other times: the baseline's machine was ten times slower.
    """
    gpt = make_run("gpt", seconds_of=lambda tokens: tokens)
    angpt = make_run("angpt", FASTER, ANGPT)
    ngpt = make_run("ngpt", SLOWER, NGPT)
    make_run("angpt2", FASTER, ANGPT, seed=2)  # without a partner
    # Noise of the machine, the same for all configurations of a round
    gpt_seconds = np.array([1.0, 1.1, 5.0, 0.9, 1.0, 1.2])
    angpt_ratios = np.array([1.25, 1.20, 1.30, 1.25, 1.24, 1.26])
    angpt_seconds = gpt_seconds * angpt_ratios
    ngpt_seconds = gpt_seconds * 2
    seconds = np.stack([gpt_seconds, angpt_seconds, ngpt_seconds])
    write_paired(tmp_path / "out", [gpt, angpt, ngpt], seconds.tolist())
    return report_on_runs(tmp_path)


@pytest.mark.usefixtures("no_plot")
def test_wall_clock_is_tokens_times_the_ratio_of_steps_in_turns(timed_in_turns):
    baseline, angpt, ngpt = timed_in_turns.raw["groups"]

    assert baseline["seconds"]["mean"] == 400, "as recorded"
    ratio_of_times = {"median": 1.25, "low": 1.20, "high": 1.30}
    assert angpt["time_per_token"] == pytest.approx(ratio_of_times)
    wall_clock = angpt["speedup_wall_clock"]
    assert wall_clock["median"] == pytest.approx(1.6 / 1.25)
    assert wall_clock["low"] is None
    assert wall_clock["high"] is None
    assert ngpt["time_per_token"]["median"] == pytest.approx(2.0)
    assert ngpt["speedup_wall_clock"] is None


@pytest.mark.usefixtures("no_plot")
def test_wall_clock_is_in_the_table_and_in_the_sentence(timed_in_turns):
    row = timed_in_turns.row("anGPT, plain")

    assert row["seeds"] == "2 (1 paired)"
    assert row["time per token"] == "1.25 (1.20 … 1.30)"
    assert row["speed-up, wall-clock"] == "1.28 (1 seed)"
    sentence = "speed-up 1.60 (1 seed) in tokens, 1.28 (1 seed) in wall-clock"
    assert sentence in timed_in_turns.markdown


def test_the_picture_has_a_panel_over_time(timed_in_turns):
    over_tokens, over_time = plots.panels_of(timed_in_turns.comparison)

    assert "over tokens and time](" in timed_in_turns.markdown
    assert over_tokens.per_token["anGPT, plain"] == 1
    minutes = 1.05 * 1.25 / 60
    assert over_time.per_token["anGPT, plain"] == pytest.approx(minutes)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("timed", "timed_on", "trained_on", "note"),
    [
        ("", {}, {}, "no steps of the baseline were timed in turns: add --measure_steps"),
        ("b", {}, {}, "no steps of the baseline were timed in turns"),
        ("ab", {}, H200, "the runs were trained on different hardware"),
        ("ab", H200, {}, "steps were timed on H200 and the runs were trained on test cpu, 2 cores"),
    ],
)
def test_without_comparable_times_the_column_says_so_and_is_empty(
    make_run, tmp_path, timed, timed_on, trained_on, note
):
    folders = {
        "a": make_run("a"),
        "b": make_run("b", FASTER, ANGPT, record=trained_on),
    }
    if timed:
        runs = [folders[name] for name in timed]
        seconds = [[1.0]] * len(runs)
        write_paired(tmp_path / "out", runs, seconds, **timed_on)

    report = report_on_runs(tmp_path)

    assert note in report.notes
    row = report.row("anGPT, plain")
    assert row["time per token"] == "–"
    assert row["speed-up, wall-clock"] == "–"


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("key", ["data.init_args.val_blocks", "data.init_args.val_samples"])
def test_losses_on_different_tokens_give_no_speed_up_and_no_test(make_run, tmp_path, key):
    for seed, losses in enumerate((SLOWER, SECOND)):
        make_run(f"gpt{seed}", losses, seed=seed)
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed, settings={key: 4})

    report = report_on_runs(tmp_path)

    ngpt = report.raw["groups"][1]
    assert ngpt["speedup_tokens"]["mean"] is None
    assert ngpt["loss_difference"] is None
    row = report.row("nGPT, plain")
    assert row["speed-up, tokens"] == "– (validated differently)"


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(("length", "is_compared"), [(128, False), (256, True)])
def test_validation_by_default_has_the_context_of_training(make_run, tmp_path, length, is_compared):
    """The baseline trains and validates on 256 tokens, by a null `val_context_length`."""
    default = {"data.init_args.val_context_length": None}
    shorter = {"model.init_args.context_length": 128, "data.init_args.val_context_length": length}
    make_run("gpt", SLOWER, settings=default)
    make_run("ngpt", FASTER, NGPT, settings=shorter)

    report = report_on_runs(tmp_path)

    assert (report.raw["groups"][1]["speedup_tokens"]["mean"] is not None) == is_compared
    note = "nGPT, plain: validated differently: val_context_length is 128, the baseline 256."
    assert (note in report.notes) == (not is_compared)


@pytest.mark.usefixtures("no_plot")
def test_an_own_class_of_data_has_settings_of_its_own(make_run, tmp_path):
    """Its `context_length` may be a text, and the model's may be longer than its sequences."""
    own = {
        "data.class_path": "mylab.Data",
        "data.init_args": {"context_length": "short", "seed": 1},
    }
    make_run("gpt", SLOWER, settings=own)
    make_run("ngpt", FASTER, NGPT, settings=own | {"model.init_args.context_length": 512})

    report = report_on_runs(tmp_path)

    assert report.raw["groups"][1]["speedup_tokens"]["mean"] is not None
    assert not any("validated differently" in note for note in report.notes)


@pytest.mark.usefixtures("no_plot")
def test_a_bound_is_shown_alike_in_every_sentence(make_run, tmp_path):
    gpt = make_run("gpt", STANDS_STILL)
    starts_below = {100: 2.9, 400: 2.6}
    ngpt = make_run("ngpt", starts_below, NGPT)
    write_paired(tmp_path / "out", [gpt, ngpt], NGPT_TAKES_TWICE_AS_LONG)

    report = report_on_runs(tmp_path)

    assert "speed-up ≥ 2.00 in tokens, ≥ 1.00 in wall-clock" in report.markdown
    row = report.row("nGPT, plain")
    assert row["speed-up, tokens"] == "≥ 2.00"
    assert row["% of tokens"] == "≤ 50 %"


@pytest.mark.usefixtures("no_plot")
def test_callbacks_that_timed_steps_leave_out_are_noted(make_run, tmp_path):
    average = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {}}
    samples = {"class_path": "anlit.Samples", "init_args": {}}
    gpt = make_run("gpt", settings={"trainer.callbacks": [samples]})
    both_callbacks = {"trainer.callbacks": [average, samples]}
    ngpt = make_run("ngpt", FASTER, NGPT, settings=both_callbacks)
    write_paired(tmp_path / "out", [gpt, ngpt], NGPT_TAKES_TWICE_AS_LONG)

    notes = report_on_runs(tmp_path).notes

    assert "nGPT, plain: its steps were timed without EMAWeightAveraging.\n" in f"{notes}\n"
    assert notes.count("timed") == 1


@pytest.mark.usefixtures("no_plot")
def test_a_baseline_that_stands_still_is_noted(make_run, tmp_path):
    make_run("gpt", STANDS_STILL)
    make_run("ngpt", FASTER, NGPT)

    notes = report_on_runs(tmp_path).notes

    has_stood_still = "GPT+, plain: has its own final loss after 50% of its tokens, where speed-ups"
    assert has_stood_still in notes


def test_runs_that_have_not_finished_give_no_speed_up_and_no_test(make_run, tmp_path, keep_figures):
    for seed, losses in enumerate((SLOWER, SECOND)):
        make_run(f"gpt{seed}", losses, seed=seed, record={"status": "running"})
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed)
    figures = keep_figures(plots)

    report = report_on_runs(tmp_path)

    ngpt = report.raw["groups"][1]
    assert report.raw["target_loss"] is None
    assert ngpt["speedup_tokens"]["mean"] is None
    assert ngpt["loss_difference"] is None
    row = report.row("nGPT, plain")
    assert row["speed-up, tokens"] == "– (baseline unfinished)"
    for column in ("% of tokens", "time per token", "speed-up, wall-clock"):
        assert row[column] == "–"
    legend = figures[0].legends[0]
    entries = [text.get_text() for text in legend.get_texts()]
    assert "final loss of" not in "".join(entries)


@pytest.mark.usefixtures("no_plot")
def test_runs_that_have_not_finished_are_so_far_at_their_loss_and_not_tested(make_run, tmp_path):
    for seed, losses in enumerate((FALLING, SECOND)):
        make_run(f"gpt{seed}", losses, seed=seed, record={"status": "running"})
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed)

    report = report_on_runs(tmp_path, baseline="nGPT")

    assert "**GPT+, plain** is so far at" in report.markdown
    assert report.raw["groups"][1]["loss_difference"] is None
