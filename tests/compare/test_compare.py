"""The whole comparison: files, numbers, baseline, notes, refusals."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from anlit import cli
from anlit.compare import plots
from anlit.compare.compare import compare
from anlit.compare.comparison import NOT_MEASURED, STEPS
from anlit.compare.notes import unstable_throughput
from anlit.errors import UserError
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import ANGPT, HARDWARE, NGPT

LR = "model.init_args.optimizer.init_args.lr"
FASTER = [(100, 4.0), (200, 3.2), (300, 2.8), (400, 2.6)]
SLOWER = [(100, 6.0), (400, 3.5)]
SECOND = [(100, 5.2), (200, 4.2), (300, 3.7), (400, 3.2)]
H200 = {"hardware": {"devices": ["H200"]}}
OTHER_CONTENT = {"data": {"content_sha256": "c1", "tokenizer_sha256": "t0"}}
OTHER_TOKENIZER = {"data": {"content_sha256": "c0", "tokenizer_sha256": "t1"}}


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(plots, "plot_convergence", lambda *_: None)


@pytest.fixture
def runs(make_run, tmp_path):
    make_run("gpt1")
    make_run("gpt2", SECOND, seed=2)
    make_run("angpt1", FASTER, ANGPT)
    make_run("angpt2", [(100, 4.2), (400, 2.7)], ANGPT, seed=2)
    make_run("ngpt", SLOWER, NGPT, seconds_of=lambda tokens: math.nan)
    make_run("failed", [], NGPT, seed=2, record={"status": "failed", "error": "out of memory"})
    return str(tmp_path / "runs")


def compared(runs, output, **options):
    """The comparison of the runs in a folder, its JSON and its Markdown."""
    report = compare([str(runs)], str(output), **options)
    return (
        report,
        json.loads((output / "convergence.json").read_text()),
        (output / "report.md").read_text(),
    )


def table_row(markdown, label):
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_plot_markdown_and_json_agree(runs, tmp_path, capsys):
    out = tmp_path / "made" / "out"
    _, raw, markdown = compared(runs, out)
    assert (out / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert raw["target_loss"] == pytest.approx(3.1)
    assert [group["label"] for group in raw["groups"]] == [
        "GPT+, plain",
        "anGPT, plain",
        "nGPT, plain",
    ]
    at = [
        200 + 100 * 0.2 / 0.4,
        100 + 300 * 1.0 / 1.5,
    ]  # where 3.0 and 3.2 are, the baseline's losses of each seed
    assert raw["groups"][1]["speedup_tokens"]["values"] == pytest.approx([400 / x for x in at])
    cells, mean = table_row(markdown, "anGPT, plain"), (400 / at[0] * 400 / at[1]) ** 0.5
    assert (cells[1], cells[3], cells[8]) == ("2", "2.6500 ± 0.0707", f"{100 / mean:.0f} %")
    assert cells[7].startswith(f"{mean:.2f} (")
    assert table_row(markdown, "GPT+, plain (baseline)")[7] == "1.00"
    assert table_row(markdown, "nGPT, plain")[6:] == ["–", "not reached", "–", "–", "–"], (
        "no times and no crossing"
    )
    assert any(
        note.startswith("nGPT, plain: LOST failed (failed, no validation)") for note in raw["notes"]
    )
    assert (
        "nGPT, plain: 1 of 2 runs are counted; left out: 1 failed, no validation." in raw["notes"]
    )
    for text in (
        "no validation: out of memory",
        "0123456789",
        "`anlit fit --config a.yaml`",
        "over tokens](",
    ):
        assert text in markdown
    assert len(raw["runs"]) == 6
    assert str(out / "convergence.png") in capsys.readouterr().out


def write_paired(folder, runs, seconds, **record):
    """paired_steps.json for some runs; `seconds` per token of each, by round."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [group_runs([load_run(Path(run))])[0].key for run in runs]
    arms = [
        {"key": key, "seconds_per_token": times} for key, times in zip(keys, seconds, strict=True)
    ]
    (folder / STEPS).write_text(json.dumps({"hardware": HARDWARE, **record, "arms": arms}))


def test_wall_clock_is_tokens_times_the_ratio_of_steps_in_turns(make_run, tmp_path):
    """However long the runs took: here the baseline's machine was ten times slower."""
    slow, quick = (
        make_run("gpt", seconds_of=lambda tokens: tokens),
        make_run("angpt", FASTER, ANGPT),
    )
    never = make_run("ngpt", SLOWER, NGPT)
    make_run("angpt2", FASTER, ANGPT, seed=2)  # without a partner
    noise = [1.0, 1.1, 5.0, 0.9, 1.0, 1.2]  # of the machine, on both in a round
    ratios = [1.25, 1.20, 1.30, 1.25, 1.24, 1.26]
    seconds = [noise, [a * b for a, b in zip(noise, ratios, strict=True)], [2 * a for a in noise]]
    write_paired(tmp_path / "out", [slow, quick, never], seconds)
    report, raw, markdown = compared(tmp_path / "runs", tmp_path / "out")
    _, angpt, ngpt = raw["groups"]
    assert angpt["time_per_token"] == pytest.approx({"median": 1.25, "low": 1.20, "high": 1.30})
    assert angpt["speedup_wall_clock"] == {
        "median": pytest.approx(1.6 / 1.25),
        "low": None,
        "high": None,
    }
    assert (ngpt["time_per_token"]["median"], ngpt["speedup_wall_clock"]) == (
        pytest.approx(2.0),
        None,
    )
    _, seeds, *_, time, wall_clock = table_row(markdown, "anGPT, plain")
    assert (seeds, time, wall_clock) == ("2 (1 paired)", "1.25 (1.20 … 1.30)", "1.28 (1 seed)")
    assert "speed-up 1.60 (1 seed) in tokens, 1.28 (1 seed) in wall-clock" in markdown
    assert "over tokens and time](" in markdown
    by_panel = [panel.per_token["anGPT, plain"] for panel in plots.panels_of(report)]
    assert by_panel == pytest.approx([1, 1.05 * 1.25 / 60])
    assert raw["groups"][0]["seconds"]["mean"] == 400  # as recorded


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
        seconds = [[1.0] for _ in timed]
        write_paired(tmp_path / "out", [folders[name] for name in timed], seconds, **timed_on)

    report, _, markdown = compared(tmp_path / "runs", tmp_path / "out")

    assert note in "\n".join(report.notes)
    assert table_row(markdown, "anGPT, plain")[9:] == ["–", "–"]


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("name", ["nGPT, plain", "NGPT", "{runs}/ngpt"])
def test_the_baseline_is_named_by_label_architecture_or_folder(runs, tmp_path, name):
    report = compare([runs], str(tmp_path / "o"), baseline=name.format(runs=runs))

    assert report.baseline.label == "nGPT, plain"


@pytest.mark.usefixtures("no_plot")
def test_without_a_gpt_run_the_baseline_must_be_named(runs, tmp_path):
    fix = r"no GPT\+ run to compare with: name the baseline with --baseline"

    with pytest.raises(UserError, match=fix):
        compare([f"{runs}/ngpt"], str(tmp_path / "o"))


@pytest.mark.usefixtures("no_plot")
def test_the_baseline_is_the_finished_gpt_group_of_lowest_loss(make_run, runs, tmp_path):
    make_run("best", [(100, 5.0), (400, 2.9)], settings={LR: 0.005})
    smaller = {"model.init_args.d_ff": 1}
    make_run("running", [(100, 2.0)], settings=smaller, record={"status": "running"})

    report = compare([runs], str(tmp_path / "o"))

    assert report.baseline.label.endswith("lr=0.005")
    assert report.notes[0].startswith("Baseline: of 3 GPT+ groups")
    assert "UNFINISHED" in "\n".join(report.notes)
    with pytest.raises(UserError, match="more than one"):
        compare([runs], str(tmp_path / "o"), baseline="GPT+")


@pytest.mark.usefixtures("no_plot")
def test_a_run_given_twice_counts_once(make_run, runs, tmp_path):
    """By another path, by a link, and as a copy; another run with the seed counts, with a note."""
    shutil.copytree(f"{runs}/angpt2", tmp_path / "runs" / "copy")
    (tmp_path / "link").symlink_to(f"{runs}/angpt1")
    paths = [runs, f"{runs}/../runs/angpt1", str(tmp_path / "link")]
    report = compare(paths, str(tmp_path / "o"))
    assert len(report.results[1].speedup.values) == len(report.results[1].final_loss.values) == 2
    assert (
        "anGPT, plain: 2 of 3 runs are counted; left out: 1 equal to another run." in report.notes
    )
    make_run("again", SLOWER, ANGPT, seed=2)
    report = compare(paths, str(tmp_path / "o"))
    assert any("seed 2 occurs more than once" in note for note in report.notes)


@pytest.mark.usefixtures("no_plot")
def test_a_report_on_other_runs_is_not_written_over(make_run, tmp_path):
    runs = [str(make_run("a")), str(make_run("b", FASTER, ANGPT)), str(make_run("c", SLOWER, NGPT))]
    compare(runs[:2], str(tmp_path / "o"))
    compare(runs, str(tmp_path / "o"))
    report = (tmp_path / "o" / "convergence.json").read_bytes()
    with pytest.raises(
        UserError, match=r"has another report \(anlit compare .*: give another folder, or remove"
    ):
        compare(runs[:2], str(tmp_path / "o"))
    assert (tmp_path / "o" / "convergence.json").read_bytes() == report


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("file", "content"),
    [("gpt-1/launches.json", "the runs of a study"), ("diagnose.json", "another report")],
)
def test_a_folder_where_another_command_reports_is_refused(make_run, tmp_path, file, content):
    """Also that of a study under way, which has not written its report yet."""
    (tmp_path / "o" / file).parent.mkdir(parents=True)
    (tmp_path / "o" / file).write_text("{}")
    with pytest.raises(UserError, match=f"--output .* has {content}.* give another folder"):
        compare([str(make_run("a")), str(make_run("b", FASTER, ANGPT))], str(tmp_path / "o"))
    assert not (tmp_path / "o" / "report.md").exists()


def test_losses_of_different_tokenizers_are_refused_if_the_text_is_not_known(make_run, tmp_path):
    runs = [make_run("a"), make_run("b", model=NGPT, record=OTHER_TOKENIZER)]

    message = "different tokenizers.* because the text of its val tokens is not known: leave it out"
    with pytest.raises(UserError, match=message):
        compare([str(run) for run in runs], str(tmp_path / "o"))

    assert not (tmp_path / "o").exists()


def test_runs_without_validation_are_refused(make_run, tmp_path):
    run = make_run("c", [])

    with pytest.raises(UserError, match="none of the 1 runs"):
        compare([str(run)], str(tmp_path / "o"))

    assert not (tmp_path / "o").exists()


FLOAT8 = "model.init_args.runtime.float8"
FULL = [(100.0 * n, 6.0 - 0.5 * n) for n in range(1, 9)]
"""Eight validation points: enough to compare the speed of two halves."""
CHANGED_AND_KILLED = [
    {"step": 4, "changed": ["lr 2 → 3", "tau 0 → 1"]},
    {"step": 6, "changed": ["lr 3 → 7"]},  # killed before it wrote a checkpoint
    {"step": 6, "changed": ["lr 3 → 5"]},
]
"""Launches of a run."""


def callback(name, **settings):
    """A single callback, as `--trainer.callbacks=NAME` writes it."""
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}


def slowing(tokens):
    return 0.1 * tokens + max(0.0, 0.05 * (tokens - 500))


def notes_on(baseline, run, folder):
    return compare([str(baseline), str(run)], str(folder)).notes


@pytest.mark.usefixtures("no_plot")
def test_a_fair_comparison_has_no_note(make_run, tmp_path):
    notes = notes_on(make_run("a"), make_run("fair", model=NGPT), tmp_path / "o")

    assert notes == (NOT_MEASURED,)


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
        ("initial_weights", "a.ckpt", "trained differently: initial_weights is True, the baseline"),
        (
            "trainer.callbacks",
            callback("EarlyStopping", patience=1),
            "trained differently: callbacks is EarlyStopping(patience=1), the baseline none.",
        ),
        (
            "trainer.callbacks",
            callback("GradientAccumulationScheduler", scheduling=4),
            "callbacks is GradientAccumulationScheduler(scheduling=4), the baseline none.",
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
@pytest.mark.parametrize(
    ("options", "note"),
    [
        pytest.param(
            {"points": [(100, 5.0), (800, 2.0)]},
            "800 training tokens, the baseline 400",
            id="longer",
        ),
        pytest.param(
            {"seed": 2},
            "no seed in common with the baseline, so its speed-up is over the baseline's mean",
            id="another seed",
        ),
        pytest.param(
            {"points": [(100, 9.0), (400, 8.5)]},
            "b: DIVERGED in effect, its final loss is above that of guessing, 6.9.",
            id="worse than guessing",
        ),
        pytest.param(
            {"points": FULL, "seconds_of": slowing},
            "b: unstable throughput, 10 tokens/s in its first half and 7",
            id="slower and slower",
        ),
    ],
)
def test_a_course_that_makes_a_comparison_unfair_is_noted(make_run, tmp_path, options, note):
    run = make_run("b", model=NGPT, **options)

    notes = notes_on(make_run("a"), run, tmp_path / "o")

    assert note in "\n".join(notes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"seconds_of": lambda tokens: 5.0 + 0.1 * tokens}, id="compiled first"),
        pytest.param({"seconds_of": lambda tokens: math.nan}, id="times are not known"),
        pytest.param(
            {
                "settings": {"data.init_args.context_schedule": {"steps": 10}},
                "seconds_of": slowing,
            },
            id="a growing context",
        ),
    ],
)
def test_a_steady_machine_gives_no_note(make_run, options):
    groups = group_runs([load_run(make_run("a", FULL, **options))])

    assert not list(unstable_throughput(groups))


def test_the_legend_lies_within_the_picture(make_run, runs, tmp_path, monkeypatch, drawn):
    """With one panel there is room for one column of entries with their spreads."""
    make_run("ngpt3", SLOWER, NGPT, seed=3)
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    compare([runs], str(tmp_path / "o"))
    drawn[0].draw_without_rendering()
    left, bottom, right, top = drawn[0].legends[0].get_window_extent().extents
    assert 0 <= left < right <= drawn[0].bbox.width
    assert 0 <= bottom < top <= drawn[0].bbox.height


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


def test_a_bound_is_one_in_every_place_and_a_baseline_that_stands_still_is_noted(
    make_run, tmp_path
):
    still = make_run("gpt", [(100, 5.0), (200, 3.0), (400, 3.0)])
    below = make_run("ngpt", [(100, 2.9), (400, 2.6)], NGPT)
    write_paired(tmp_path / "out", [still, below], [[1.0] * 6, [2.0] * 6])
    _, _, markdown = compared(tmp_path / "runs", tmp_path / "out")
    assert "speed-up ≥ 2.00 in tokens, ≥ 1.00 in wall-clock" in markdown
    assert (
        "GPT+, plain: has its own final loss after 50% of its tokens, where speed-ups count."
        in markdown
    )


def test_runs_that_have_not_finished_give_no_speed_up_and_no_test(
    make_run, tmp_path, monkeypatch, drawn
):
    for seed, points in enumerate((SLOWER, SECOND)):
        make_run(f"gpt{seed}", points, seed=seed, record={"status": "running"})
        make_run(f"ngpt{seed}", FASTER, NGPT, seed=seed)
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    _, raw, markdown = compared(tmp_path / "runs", tmp_path / "out")
    ngpt = raw["groups"][1]
    assert (raw["target_loss"], ngpt["speedup_tokens"]["mean"], ngpt["loss_difference"]) == (
        None,
        None,
        None,
    )
    assert (
        "**GPT+, plain** is so far at"
        in compared(tmp_path / "runs", tmp_path / "other", baseline="nGPT")[2]
    )
    assert table_row(markdown, "nGPT, plain")[7:] == ["– (baseline unfinished)", "–", "–", "–"]
    assert not any("final loss of" in text.get_text() for text in drawn[0].legends[0].get_texts())


EVIL = (
    "x\x1b[2J ![p](http://evil/p.png) ![q](../secret.png) <img src=http://evil/r.png> "
    "[l](http://evil) `"
)
TOLD = {
    "command": EVIL,
    "git": {"commit": EVIL, "dirty": False},
    "hardware": {"devices": [EVIL]},
    "error": EVIL,
}


def test_foreign_text_of_runs_is_shown_and_not_obeyed(make_run, tmp_path, capsys):
    make_run("b\x1b[2J` ![p](http:evil.png)", model=ANGPT)
    make_run("class", model=f"anlit.{EVIL}")
    make_run("settings", settings={"model.init_args.note": EVIL, "data.init_args.name": EVIL})
    make_run("told", model=NGPT, record={**TOLD, "versions": {"torch": EVIL}})
    make_run("failed", model=NGPT, seed=2, record={**TOLD, "status": "failed"})
    (tmp_path / "secret.png").write_bytes((b"\x89PNG" + bytes(16)) * 2)
    assert (
        cli.main(
            [
                "compare",
                str(tmp_path / "runs"),
                "--output",
                str(tmp_path / "out"),
                "--baseline",
                "nGPT",
            ]
        )
        == 0
    )
    assert "\x1b[2J" not in "".join(capsys.readouterr())
    page, text = ((tmp_path / "out" / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert set(re.findall(r"<img[^>]* src=\"([^\"]{0,22})", page)) == {"data:image/png;base64,"}
    assert '<a href="http' not in page
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert set(re.findall(r"<img src=\"([^\"]*)", rendered)) == {"convergence.png"}
    assert not re.search(r"<a |<img src=http", rendered)
