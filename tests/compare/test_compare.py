"""The files of a comparison, its baseline, and refusals."""

import math
import re
import shutil

import pytest
from markdown_it import MarkdownIt

from anlit import cli
from anlit.compare import plots
from anlit.compare.compare import compare
from anlit.errors import UserError
from tests.compare.conftest import ANGPT, NGPT
from tests.compare.reports import FASTER, LR, SECOND, SLOWER, compared, table_row

OTHER_TOKENIZER = {"data": {"content_sha256": "c0", "tokenizer_sha256": "t1"}}


@pytest.fixture
def runs(make_run, tmp_path):
    make_run("gpt1")
    make_run("gpt2", SECOND, seed=2)
    make_run("angpt1", FASTER, ANGPT)
    make_run("angpt2", [(100, 4.2), (400, 2.7)], ANGPT, seed=2)
    make_run("ngpt", SLOWER, NGPT, seconds_of=lambda tokens: math.nan)
    make_run("failed", [], NGPT, seed=2, record={"status": "failed", "error": "out of memory"})
    return str(tmp_path / "runs")


def test_plot_markdown_and_json_agree(runs, tmp_path, capsys):
    output = tmp_path / "made" / "out"

    _, raw, markdown = compared(runs, output)

    assert (output / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert str(output / "convergence.png") in capsys.readouterr().out
    assert raw["target_loss"] == pytest.approx(3.1)
    labels = [group["label"] for group in raw["groups"]]
    assert labels == ["GPT+, plain", "anGPT, plain", "nGPT, plain"]
    assert len(raw["runs"]) == 6

    # Where anGPT's two runs have 3.0 and 3.2, the final losses of the baseline's seeds
    tokens_of_seed_1 = 200 + 100 * 0.2 / 0.4
    tokens_of_seed_2 = 100 + 300 * 1.0 / 1.5
    speedups = [400 / tokens_of_seed_1, 400 / tokens_of_seed_2]
    assert raw["groups"][1]["speedup_tokens"]["values"] == pytest.approx(speedups)

    mean = math.sqrt(math.prod(speedups))
    _, seeds, _, loss, _, _, _, speedup, share, *_ = table_row(markdown, "anGPT, plain")
    assert seeds == "2"
    assert loss == "2.6500 ± 0.0707"
    assert speedup.startswith(f"{mean:.2f} (")
    assert share == f"{100 / mean:.0f} %"
    assert table_row(markdown, "GPT+, plain (baseline)")[7] == "1.00"
    without_crossing_and_times = ["–", "not reached", "–", "–", "–"]
    assert table_row(markdown, "nGPT, plain")[6:] == without_crossing_and_times


def test_a_failed_run_and_the_origin_of_runs_are_in_the_report(runs, tmp_path):
    _, raw, markdown = compared(runs, tmp_path / "out")

    notes = "\n".join(raw["notes"])
    assert "nGPT, plain: LOST failed (failed, no validation)" in notes
    assert "nGPT, plain: 1 of 2 runs are counted; left out: 1 failed, no validation." in notes
    assert "no validation: out of memory" in markdown
    assert "0123456789" in markdown, "the commit"
    assert "`anlit fit --config a.yaml`" in markdown
    assert "over tokens](" in markdown


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
def test_a_run_given_twice_counts_once(runs, tmp_path):
    """By another path, by a link, and as a copy."""
    shutil.copytree(f"{runs}/angpt2", tmp_path / "runs" / "copy")
    (tmp_path / "link").symlink_to(f"{runs}/angpt1")
    paths = [runs, f"{runs}/../runs/angpt1", str(tmp_path / "link")]

    report = compare(paths, str(tmp_path / "o"))

    angpt = report.results[1]
    assert len(angpt.speedup.values) == len(angpt.final_loss.values) == 2
    left_out = "anGPT, plain: 2 of 3 runs are counted; left out: 1 equal to another run."
    assert left_out in report.notes


@pytest.mark.usefixtures("no_plot")
def test_a_seed_that_occurs_twice_is_noted(make_run, runs, tmp_path):
    make_run("again", SLOWER, ANGPT, seed=2)

    report = compare([runs], str(tmp_path / "o"))

    assert "seed 2 occurs more than once" in "\n".join(report.notes)


@pytest.mark.usefixtures("no_plot")
def test_a_report_on_other_runs_is_not_written_over(make_run, tmp_path):
    folders = [make_run("a"), make_run("b", FASTER, ANGPT), make_run("c", SLOWER, NGPT)]
    runs = list(map(str, folders))
    compare(runs[:2], str(tmp_path / "o"))
    compare(runs, str(tmp_path / "o"))  # more runs than before
    report = (tmp_path / "o" / "convergence.json").read_bytes()

    refusal = r"has another report \(anlit compare\): give another folder, or remove"
    with pytest.raises(UserError, match=refusal):
        compare(runs[:2], str(tmp_path / "o"))

    assert (tmp_path / "o" / "convergence.json").read_bytes() == report


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    ("file", "content"),
    [("gpt-1/launches.json", "the runs of a study"), ("diagnose.json", "another report")],
)
def test_a_folder_where_another_command_reports_is_refused(make_run, tmp_path, file, content):
    """Also the folder of a study that has not written its report yet."""
    (tmp_path / "o" / file).parent.mkdir(parents=True)
    (tmp_path / "o" / file).write_text("{}")
    runs = [str(make_run("a")), str(make_run("b", FASTER, ANGPT))]

    with pytest.raises(UserError, match=f"--output .* has {content}.* give another folder"):
        compare(runs, str(tmp_path / "o"))

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


def test_the_legend_lies_within_the_picture(make_run, runs, tmp_path, monkeypatch, drawn):
    """With one panel there is room for one column of entries with their spreads."""
    make_run("ngpt3", SLOWER, NGPT, seed=3)
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))

    compare([runs], str(tmp_path / "o"))

    figure = drawn[0]
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
    make_run("record", model=NGPT, record={**EVIL_RECORD, "versions": {"torch": EVIL}})
    make_run("failed", model=NGPT, seed=2, record={**EVIL_RECORD, "status": "failed"})
    (tmp_path / "secret.png").write_bytes((b"\x89PNG" + bytes(16)) * 2)
    output = tmp_path / "out"

    command = ["compare", str(tmp_path / "runs"), "--output", str(output), "--baseline", "nGPT"]
    assert cli.main(command) == 0

    assert "\x1b[2J" not in "".join(capsys.readouterr())
    page = (output / "report.html").read_text()
    assert set(re.findall(r"<img[^>]* src=\"([^\"]{0,22})", page)) == {"data:image/png;base64,"}
    assert '<a href="http' not in page
    markdown = (output / "report.md").read_text()
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    assert set(re.findall(r"<img src=\"([^\"]*)", rendered)) == {"convergence.png"}
    assert not re.search(r"<a |<img src=http", rendered)
