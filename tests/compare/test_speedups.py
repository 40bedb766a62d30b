"""Speed-ups in tokens and in wall-clock, and the reasons to give none."""

import numpy as np
import pytest

from anlit.compare import plots
from tests.compare.conftest import ANGPT, NGPT
from tests.compare.reports import FASTER, H200, SECOND, SLOWER, compared, table_row, write_paired

NGPT_TAKES_TWICE_AS_LONG = [[1.0] * 6, [2.0] * 6]
"""Seconds of a step of GPT+ and of nGPT, in six rounds."""


@pytest.fixture
def timed_in_turns(make_run, tmp_path):
    """A comparison of three runs whose steps were timed in turns.

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
    return compared(tmp_path / "runs", tmp_path / "out")


@pytest.mark.usefixtures("no_plot")
def test_wall_clock_is_tokens_times_the_ratio_of_steps_in_turns(timed_in_turns):
    _, raw, _ = timed_in_turns

    baseline, angpt_group, ngpt_group = raw["groups"]
    assert baseline["seconds"]["mean"] == 400, "as recorded"
    time = angpt_group["time_per_token"]
    assert time == pytest.approx({"median": 1.25, "low": 1.20, "high": 1.30})
    wall_clock = angpt_group["speedup_wall_clock"]
    assert wall_clock["median"] == pytest.approx(1.6 / 1.25)
    assert wall_clock["low"] is None
    assert wall_clock["high"] is None
    assert ngpt_group["time_per_token"]["median"] == pytest.approx(2.0)
    assert ngpt_group["speedup_wall_clock"] is None


@pytest.mark.usefixtures("no_plot")
def test_wall_clock_is_in_the_table_and_in_the_sentence(timed_in_turns):
    _, _, markdown = timed_in_turns

    _, seeds, *_, time_cell, wall_clock_cell = table_row(markdown, "anGPT, plain")
    assert seeds == "2 (1 paired)"
    assert time_cell == "1.25 (1.20 … 1.30)"
    assert wall_clock_cell == "1.28 (1 seed)"
    assert "speed-up 1.60 (1 seed) in tokens, 1.28 (1 seed) in wall-clock" in markdown


def test_the_picture_has_a_panel_over_time(timed_in_turns):
    report, _, markdown = timed_in_turns

    assert "over tokens and time](" in markdown
    by_panel = [panel.per_token["anGPT, plain"] for panel in plots.panels_of(report)]
    assert by_panel == pytest.approx([1, 1.05 * 1.25 / 60])


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
    folders = {"a": make_run("a"), "b": make_run("b", FASTER, ANGPT, record=trained_on)}
    if timed:
        runs = [folders[name] for name in timed]
        seconds = [[1.0]] * len(runs)
        write_paired(tmp_path / "out", runs, seconds, **timed_on)

    report, _, markdown = compared(tmp_path / "runs", tmp_path / "out")

    assert note in "\n".join(report.notes)
    assert table_row(markdown, "anGPT, plain")[9:] == ["–", "–"]


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("key", ["data.init_args.val_blocks", "data.init_args.val_samples"])
def test_losses_on_different_tokens_give_no_speed_up_and_no_test(make_run, tmp_path, key):
    for seed, points in enumerate((SLOWER, SECOND)):
        make_run(f"gpt{seed}", points, seed=seed)
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed, settings={key: 4})

    _, raw, markdown = compared(tmp_path / "runs", tmp_path / "out")

    ngpt = raw["groups"][1]
    assert ngpt["speedup_tokens"]["mean"] is None
    assert ngpt["loss_difference"] is None
    assert table_row(markdown, "nGPT, plain")[7] == "– (validated differently)"


def test_a_bound_is_shown_alike_in_every_sentence(make_run, tmp_path):
    gpt = make_run("gpt", [(100, 5.0), (200, 3.0), (400, 3.0)])
    ngpt = make_run("ngpt", [(100, 2.9), (400, 2.6)], NGPT)  # already below at the first validation
    write_paired(tmp_path / "out", [gpt, ngpt], NGPT_TAKES_TWICE_AS_LONG)

    _, _, markdown = compared(tmp_path / "runs", tmp_path / "out")

    assert "speed-up ≥ 2.00 in tokens, ≥ 1.00 in wall-clock" in markdown
    assert table_row(markdown, "nGPT, plain")[7:9] == ["≥ 2.00", "≤ 50 %"]


@pytest.mark.usefixtures("no_plot")
def test_callbacks_that_timed_steps_leave_out_are_noted(make_run, tmp_path):
    average = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {}}
    samples = {"class_path": "anlit.Samples", "init_args": {}}
    gpt = make_run("gpt", settings={"trainer.callbacks": [samples]})
    ngpt = make_run("ngpt", FASTER, NGPT, settings={"trainer.callbacks": [average, samples]})
    write_paired(tmp_path / "out", [gpt, ngpt], NGPT_TAKES_TWICE_AS_LONG)

    report, _, _ = compared(tmp_path / "runs", tmp_path / "out")

    timed = [note for note in report.notes if "timed" in note]
    assert timed == ["nGPT, plain: its steps were timed without EMAWeightAveraging."]


@pytest.mark.usefixtures("no_plot")
def test_a_baseline_that_stands_still_is_noted(make_run, tmp_path):
    make_run("gpt", [(100, 5.0), (200, 3.0), (400, 3.0)])
    make_run("ngpt", FASTER, NGPT)

    report, _, _ = compared(tmp_path / "runs", tmp_path / "out")

    has_stood_still = "GPT+, plain: has its own final loss after 50% of its tokens, where speed-ups"
    assert has_stood_still in "\n".join(report.notes)


def test_runs_that_have_not_finished_give_no_speed_up_and_no_test(
    make_run, tmp_path, monkeypatch, drawn
):
    for seed, points in enumerate((SLOWER, SECOND)):
        make_run(f"gpt{seed}", points, seed=seed, record={"status": "running"})
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed)
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))

    _, raw, markdown = compared(tmp_path / "runs", tmp_path / "out")

    ngpt = raw["groups"][1]
    assert raw["target_loss"] is None
    assert ngpt["speedup_tokens"]["mean"] is None
    assert ngpt["loss_difference"] is None
    assert table_row(markdown, "nGPT, plain")[7:] == ["– (baseline unfinished)", "–", "–", "–"]
    entries = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "final loss of" not in "".join(entries)


@pytest.mark.usefixtures("no_plot")
def test_a_run_that_has_not_finished_is_so_far_at_its_loss(make_run, tmp_path):
    make_run("gpt", record={"status": "running"})
    make_run("ngpt", FASTER, NGPT)

    _, _, markdown = compared(tmp_path / "runs", tmp_path / "out", baseline="nGPT")

    assert "**GPT+, plain** is so far at" in markdown
