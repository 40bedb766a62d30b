"""The files of a comparison, its baseline, and refusals."""

import math
import re
import shutil

import pytest
from markdown_it import MarkdownIt

from anlit import cli
from anlit.compare import plots
from anlit.compare.compare import compare
from anlit.compare.comparison import compare_groups
from anlit.errors import UserError
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import ANGPT, NGPT
from tests.compare.reports import FASTER, LR, SECOND, SLOWER, report_on_runs

OTHER_TOKENIZER = {"data": {"content_sha256": "c0", "tokenizer_sha256": "t1"}}


@pytest.fixture
def runs(make_run, tmp_path):
    make_run("gpt1")
    make_run("gpt2", SECOND, seed=2)
    make_run("angpt1", FASTER, ANGPT)
    make_run("angpt2", {100: 4.2, 400: 2.7}, ANGPT, seed=2)
    make_run("ngpt", SLOWER, NGPT, seconds_of=lambda tokens: math.nan)
    failed = {"status": "failed", "error": "out of memory"}
    make_run("failed", {}, NGPT, seed=2, record=failed)
    return tmp_path / "runs"


@pytest.fixture
def angpt_speedups():
    """The speed-ups of the two runs of anGPT, by hand.

    Their curves have 3.0 and 3.2 there, the final losses of the baseline's seeds.
    """
    tokens_of_seed_1 = 200 + 100 * 0.2 / 0.4
    tokens_of_seed_2 = 100 + 300 * 1.0 / 1.5
    return [400 / tokens_of_seed_1, 400 / tokens_of_seed_2]


@pytest.mark.usefixtures("runs")
def test_the_command_writes_a_picture_and_the_numbers(tmp_path, capsys, angpt_speedups):
    raw = report_on_runs(tmp_path, "made/out").raw

    picture = tmp_path / "made" / "out" / "convergence.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out
    labels = [group["label"] for group in raw["groups"]]
    assert labels == ["GPT+, plain", "anGPT, plain", "nGPT, plain"]
    assert len(raw["runs"]) == 6
    assert raw["target_loss"] == pytest.approx(3.1)
    speedups = raw["groups"][1]["speedup_tokens"]["values"]
    assert speedups == pytest.approx(angpt_speedups)


@pytest.mark.usefixtures("no_plot", "runs")
def test_the_printed_table_tells_what_its_marks_mean(tmp_path, capsys):
    """The page has the definitions, and a reader of the terminal may not open it."""
    report_on_runs(tmp_path)

    printed = capsys.readouterr().out
    assert " ± " in printed
    assert "bits" not in printed
    assert "±: standard deviation over seeds; in brackets: 95 % interval\n" in printed


@pytest.mark.usefixtures("no_plot")
def test_a_printed_table_without_marks_explains_none(make_run, tmp_path, capsys):
    make_run("a")

    compare([str(tmp_path / "runs")], str(tmp_path / "out"))

    printed = capsys.readouterr().out
    assert "standard deviation" not in printed
    assert "interval" not in printed


@pytest.mark.usefixtures("no_plot")
def test_a_single_seed_claims_no_certainty(make_run, tmp_path, capsys):
    make_run("a")
    make_run("b", {100: 5.0, 200: 3.0, 400: 2.5}, model=NGPT)

    compare([str(tmp_path / "runs")], str(tmp_path / "out"))

    assert "a speed-up without an interval: one seed" in capsys.readouterr().out
    sentence = "ends at 2.5000 nats per token on one seed, which tests nothing; speed-up 2.00"
    assert sentence in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("no_plot")
def test_a_better_gpt_group_that_lost_a_run_is_no_silent_loser(make_run, tmp_path):
    """Without a mean loss it cannot be the baseline, and its other seeds may well be better."""
    make_run("a")
    make_run("better", {100: 4.0, 400: 2.0}, settings={LR: 0.005})
    failed = {"status": "failed", "error": "NaN"}
    make_run("lost", {}, seed=2, settings={LR: 0.005}, record=failed)

    notes = compare([str(tmp_path / "runs")], str(tmp_path / "out")).notes

    assert "lowest mean final loss of those without a LOST run." in notes[0]


@pytest.mark.usefixtures("no_plot", "runs")
def test_the_table_has_losses_and_speed_ups(tmp_path, angpt_speedups):
    report = report_on_runs(tmp_path)

    mean = math.sqrt(math.prod(angpt_speedups))
    baseline = report.row("GPT+, plain (baseline)")
    angpt = report.row("anGPT, plain")
    ngpt = report.row("nGPT, plain")
    assert angpt["seeds"] == "2"
    assert angpt["validation loss"] == "2.6500 ± 0.0707"
    assert angpt["speed-up, tokens"].startswith(f"{mean:.2f} (")
    assert angpt["% of tokens"] == f"{100 / mean:.0f} %"
    assert baseline["speed-up, tokens"] == "1.00"
    assert ngpt["speed-up, tokens"] == "not reached"
    test = r"not significant by the paired t-test, n = 2, p = 0\.\d\d, Holm p = 0\.\d\d;"
    assert re.search(test, report.markdown)
    for column in ("seconds", "% of tokens", "time per token", "speed-up, wall-clock"):
        assert ngpt[column] == "–"


@pytest.mark.usefixtures("no_plot", "runs")
def test_a_failed_run_and_the_origin_of_runs_are_in_the_report(tmp_path):
    report = report_on_runs(tmp_path)

    counts = "nGPT, plain: 1 of 2 runs are counted; left out: 1 failed, no validation."
    assert counts in report.notes
    assert "nGPT, plain: LOST failed (failed, no validation)" in report.notes
    assert "| nGPT, plain | 2 | – | failed, no validation: out of memory |" in report.markdown
    assert "| GPT+, plain | 2 | 3.2000 | finished |" in report.markdown
    assert "0123456789" in report.markdown, "the commit"
    assert "`anlit fit --config a.yaml`" in report.markdown
    assert "- versions: python 3.12, torch 2.11" in report.markdown
    assert "over tokens](" in report.markdown


@pytest.mark.usefixtures("no_plot", "runs")
def test_a_group_has_the_tokens_and_seconds_of_its_last_validation(tmp_path):
    report = report_on_runs(tmp_path)

    baseline = report.raw["groups"][0]
    assert baseline["tokens"]["values"] == [400, 400]
    assert baseline["seconds"]["values"] == [40, 40]
    assert report.row("GPT+, plain (baseline)")["tokens"] == "400"


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("name", ["nGPT, plain", "NGPT", "{runs}/ngpt"])
def test_the_baseline_is_named_by_label_architecture_or_folder(runs, tmp_path, name):
    report = report_on_runs(tmp_path, baseline=name.format(runs=runs))

    assert report.comparison.baseline.label == "nGPT, plain"


@pytest.mark.usefixtures("no_plot")
def test_without_a_gpt_run_the_baseline_must_be_named(runs, tmp_path):
    fix = r"no GPT\+ run to compare with: name the baseline with --baseline"

    with pytest.raises(UserError, match=fix):
        compare([f"{runs}/ngpt"], str(tmp_path / "out"))


@pytest.mark.usefixtures("no_plot", "runs")
def test_the_baseline_of_finished_gpt_groups_is_the_group_of_lowest_loss(make_run, tmp_path):
    make_run("best", {100: 5.0, 400: 2.9}, settings={LR: 0.005})

    notes = report_on_runs(tmp_path).notes

    assert re.search(r"Baseline: of 2 GPT\+ groups, '.*lr=0.005' has the lowest .* loss\.\n", notes)


@pytest.mark.usefixtures("no_plot", "runs")
def test_the_baseline_is_the_finished_gpt_group_of_lowest_loss(make_run, tmp_path):
    make_run("best", {100: 5.0, 400: 2.9}, settings={LR: 0.005})
    smaller = {"model.init_args.d_ff": 1}
    make_run("running", {100: 2.0}, settings=smaller, record={"status": "running"})

    report = report_on_runs(tmp_path)

    assert report.comparison.baseline.label.endswith("lr=0.005")
    assert report.notes.startswith("Baseline: of 3 GPT+ groups")
    assert "has the lowest mean final loss of those that finished" in report.notes
    assert "UNFINISHED" in report.notes
    with pytest.raises(UserError, match="more than one"):
        report_on_runs(tmp_path, baseline="GPT+")


@pytest.mark.usefixtures("no_plot")
def test_a_run_given_twice_counts_once(runs, tmp_path):
    """By another path, by a link, and as a copy."""
    shutil.copytree(runs / "angpt2", runs / "copy")
    link = tmp_path / "link"
    link.symlink_to(runs / "angpt1")
    paths = [str(runs), f"{runs}/../runs/angpt1", str(link)]

    comparison = compare(paths, str(tmp_path / "out"))

    angpt = comparison.results[1]
    assert len(angpt.speedup.values) == 2
    assert len(angpt.final_loss.values) == 2
    left_out = "anGPT, plain: 2 of 3 runs are counted; left out: 1 of the seed of a later run."
    assert left_out in comparison.notes


@pytest.mark.usefixtures("no_plot")
def test_of_a_seed_that_was_run_twice_the_last_run_counts(make_run, runs, tmp_path):
    later = make_run("later", SLOWER, ANGPT, seed=2)

    comparison = compare([str(runs)], str(tmp_path / "out"))

    angpt = comparison.results[1]
    assert len(angpt.speedup.values) == 2
    assert len(angpt.final_loss.values) == 2
    assert angpt.final_loss.values[-1] == load_run(later).final_loss
    left_out = "anGPT, plain: 2 of 3 runs are counted; left out: 1 of the seed of a later run."
    assert left_out in comparison.notes


@pytest.mark.usefixtures("no_plot")
def test_the_later_of_two_runs_is_told_by_their_start_and_not_by_their_folders(make_run, tmp_path):
    """`runs/gpt-10` was trained after `runs/gpt-9` and comes before it."""
    make_run("gpt-9", record={"launches": [{"started": "2026-11-29T02:00:42+00:00"}]})
    later = make_run(
        "gpt-10", SECOND, record={"launches": [{"started": "2026-11-30T02:00:42+00:00"}]}
    )

    comparison = compare([str(tmp_path / "runs")], str(tmp_path / "out"))

    assert comparison.baseline.final_loss.values == [load_run(later).final_loss]


@pytest.mark.usefixtures("no_plot", "runs")
def test_runs_that_differ_in_the_seed_of_their_data_alone_are_noted(make_run, tmp_path):
    make_run("again", SLOWER, ANGPT, seed=2, settings={"data.init_args.seed": 7})

    notes = report_on_runs(tmp_path).notes

    assert "seed 2 occurs more than once" in notes


@pytest.mark.usefixtures("no_plot")
def test_a_report_on_other_runs_is_not_written_over(make_run, tmp_path):
    baseline = make_run("a")
    others = [make_run("b", FASTER, ANGPT), make_run("c", SLOWER, NGPT)]
    all_runs = list(map(str, [baseline, *others]))
    two_runs = all_runs[:2]
    output = str(tmp_path / "out")
    compare(two_runs, output)
    compare(all_runs, output)  # more runs than before
    file = tmp_path / "out" / "convergence.json"
    numbers = file.read_bytes()

    refusal = r"has another report \(anlit compare\): give another folder, or remove"
    with pytest.raises(UserError, match=refusal):
        compare(two_runs, output)

    assert file.read_bytes() == numbers


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("file", "content"),
    [("gpt-1/launches.json", "the runs of a study"), ("diagnose.json", "another report")],
)
def test_a_folder_where_another_command_reports_is_refused(make_run, tmp_path, file, content):
    """Also the folder of a study that has not written its report yet."""
    make_run("a")
    make_run("b", FASTER, ANGPT)
    occupied = tmp_path / "out" / file
    occupied.parent.mkdir(parents=True)
    occupied.write_text("{}")

    with pytest.raises(UserError, match=f"--output .* has {content}.* give another folder"):
        report_on_runs(tmp_path)

    assert not (tmp_path / "out" / "report.md").exists()


def test_losses_of_different_tokenizers_are_refused_if_the_text_is_not_known(make_run, tmp_path):
    make_run("a")
    make_run("b", model=NGPT, record=OTHER_TOKENIZER)

    message = "different tokenizers.* because the text of its val tokens is not known: leave it out"
    with pytest.raises(UserError, match=message):
        report_on_runs(tmp_path)

    assert not (tmp_path / "out").exists()


def test_groups_with_different_tokenizers_do_not_compare_by_loss_per_token(make_run, tmp_path):
    runs = [load_run(make_run("a")), load_run(make_run("b", model=NGPT, record=OTHER_TOKENIZER))]
    groups = group_runs(runs)

    with pytest.raises(UserError, match="trained with different tokenizers"):
        compare_groups(groups, groups[0], runs, tmp_path, command="")


def test_runs_without_validation_are_refused(make_run, tmp_path):
    make_run("c", {})

    with pytest.raises(UserError, match="none of the 1 runs"):
        report_on_runs(tmp_path)

    assert not (tmp_path / "out").exists()


def test_a_band_shows_no_loss_below_all_runs(make_run, tmp_path, keep_figures):
    """With the standard deviation, a diverged seed took the band to 1.1, and the axis with it."""
    lowest = 3.0
    make_run("gpt1", {100: 4.0, 400: lowest})
    make_run("gpt2", {100: 4.0, 400: 3.1}, seed=2)
    make_run("gpt3", {100: 5.0, 400: 11.0}, seed=3)
    make_run("angpt", {100: 4.0, 400: lowest}, ANGPT)
    figures = keep_figures(plots)

    report_on_runs(tmp_path)

    (figure,) = figures
    (axes, *_) = figure.axes
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == lowest
    assert band[:, 1].max() == 11
    low, high = axes.get_ylim()
    highest_mean = (3.0 + 3.1 + 11.0) / 3
    assert lowest - 0.5 < low < lowest
    assert highest_mean < high < highest_mean + 0.5


def test_a_curve_far_above_the_baseline_leaves_the_picture(make_run, tmp_path, keep_figures):
    make_run("gpt1")
    make_run("ngpt", {100: 4.0, 400: 50.0}, NGPT)
    figures = keep_figures(plots)

    report_on_runs(tmp_path)

    low, high = figures[0].axes[0].get_ylim()
    assert low < 3.0
    assert high < 10


def test_the_picture_names_its_axes_and_the_final_loss_of_the_baseline(
    make_run, tmp_path, keep_figures
):
    make_run("gpt1")
    make_run("angpt", FASTER, ANGPT)
    figures = keep_figures(plots)

    report_on_runs(tmp_path, "one_seed")
    make_run("gpt2", SECOND, seed=2)
    report_on_runs(tmp_path, "two_seeds")

    ends = []
    for figure in figures:
        assert figure.axes[0].get_ylabel() == "validation loss (nats per token)"
        entry = figure.legends[0].get_texts()[-1]
        ends.append(entry.get_text().replace("\n", " "))
    target = "final loss of GPT+, plain"
    assert ends == [target, f"{target}; bands: from the lowest to the highest seed"]


@pytest.mark.usefixtures("runs")
def test_the_legend_lies_within_the_picture(make_run, tmp_path, keep_figures):
    """A single panel has room for a single column of entries with their spreads."""
    make_run("ngpt3", SLOWER, NGPT, seed=3)
    figures = keep_figures(plots)

    report_on_runs(tmp_path)

    (figure,) = figures
    figure.draw_without_rendering()
    left, bottom, right, top = figure.legends[0].get_window_extent().extents
    assert 0 <= left < right <= figure.bbox.width
    assert 0 <= bottom < top <= figure.bbox.height


EVIL = (
    "x\x1b[2J ![p](http://evil/p.png) ![q](../secret.png) <img src=http://evil/r.png> "
    "[l](http://evil) `"
)
EVIL_RECORD = {
    "command": EVIL,
    "git": {"commit": EVIL, "dirty": False},
    "hardware": {"devices": [EVIL]},
    "error": EVIL,
}


def test_foreign_text_of_runs_is_shown_and_not_obeyed(make_run, tmp_path, capsys):
    make_run("b\x1b[2J` ![p](http:evil.png)", model=ANGPT)
    make_run("class", model=f"anlit.{EVIL}")
    make_run("settings", settings={"model.init_args.note": EVIL, "data.init_args.name": EVIL})
    make_run("record", model=NGPT, record=EVIL_RECORD | {"versions": {"torch": EVIL}})
    make_run("failed", model=NGPT, seed=2, record=EVIL_RECORD | {"status": "failed"})
    (tmp_path / "secret.png").write_bytes((b"\x89PNG" + bytes(16)) * 2)
    runs = str(tmp_path / "runs")
    output = tmp_path / "out"

    code = cli.main(["compare", runs, f"--output={output}", "--baseline=nGPT"])

    assert code == 0
    assert "\x1b[2J" not in "".join(capsys.readouterr())
    page = (output / "report.html").read_text()
    beginnings_of_pictures = re.findall(r"<img[^>]* src=\"([^\"]{0,22})", page)
    assert set(beginnings_of_pictures) == {"data:image/png;base64,"}
    assert '<a href="http' not in page
    markdown = (output / "report.md").read_text()
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    rendered = renderer.render(markdown)
    pictures = re.findall(r"<img src=\"([^\"]*)", rendered)
    assert set(pictures) == {"convergence.png"}
    assert not re.search(r"<a |<img src=http", rendered)
