"""`anlit runs`: what a table of runs says of each."""

import json
import os
import re
from operator import itemgetter
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.runs.overview import SORT_KEYS, TAIL_BYTES

LOGGED = "step,train/tokens,train/loss,train/learning_rate,train/tokens_per_second,val/loss"


def log(run: Path, *rows: str) -> None:
    """Write metrics with these rows, each `step,tokens,loss,rate,speed,val_loss`."""
    (run / "metrics.csv").write_text("\n".join([LOGGED, *rows, ""]))


def overviews(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict]:
    assert main(["runs", str(folder), "--json", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    return list(map(json.loads, lines))


def test_a_run_is_told_by_its_last_numbers(make_run, capsys) -> None:
    run = make_run("a", record={"status": "interrupted"})
    log(run, "9,10240,5.5,0.001,2000,", "9,,,,,5.25", "19,20480,4.5,0.0005,2100,")
    os.utime(run / "metrics.csv", (0, 0))

    (overview,) = overviews(run.parent, capsys)

    age = overview.pop("age")
    assert age > 1e9
    assert overview == {
        "name": "a",
        "folder": "a",
        "tags": [],
        "state": "interrupted",
        "step": 20,
        "steps": 1000,
        "tokens": 20480.0,
        "train_loss": 4.5,
        "val_loss": 5.25,
        "rate": 0.0005,
        "tokens_per_second": 2100.0,
        "changes": [],
    }


def test_changes_are_those_against_the_first_run(make_run, capsys) -> None:
    make_run("a", seed=1)
    run = make_run("b", seed=2, settings={"model.init_args.optimizer.init_args.lr": 0.004})

    _, overview = overviews(run.parent, capsys)

    assert set(overview["changes"]) == {"lr=0.004", "seed_everything=2"}


def test_a_run_without_metrics_is_listed(make_run, capsys) -> None:
    run = make_run("a")
    (run / "metrics.csv").unlink()

    (overview,) = overviews(run.parent, capsys)

    assert overview["step"] is None
    assert overview["val_loss"] is None


def test_only_the_end_of_long_metrics_is_read(make_run, capsys) -> None:
    run = make_run("a")
    long = ["1,10,9.0,0.1,1,9.0"] * TAIL_BYTES
    log(run, *long, "5,20480,4.5,0.0005,2100,")

    (overview,) = overviews(run.parent, capsys)

    assert (overview["step"], overview["train_loss"]) == (6, 4.5)


@pytest.mark.parametrize("key", SORT_KEYS)
def test_runs_are_sorted_and_those_without_a_value_come_last(make_run, capsys, key) -> None:
    for name, loss in (("a", "4.0"), ("b", "3.0"), ("c", "")):
        log(make_run(name), f"9,10,{loss},,,{loss}")

    runs = overviews(make_run("d").parent, capsys, "--sort", key)

    values = list(map(itemgetter(key), runs))
    n_missing = values.count(None)
    present = values[: len(values) - n_missing]
    assert None not in present
    assert present == sorted(present)


@pytest.mark.parametrize(
    ("width", "columns"), [(80, {"changes", "val"}), (140, {"rate", "tokens"})]
)
def test_the_table_fits_its_terminal(make_run, capsys, monkeypatch, width, columns) -> None:
    for seed in (1, 2):
        log(make_run(f"a-run-with-a-long-name-{seed}", seed=seed), "9,10240,5.5,0.001,2000,5.25")
    monkeypatch.setattr("anlit.commands.runs.console", lambda: console_of(width))

    main(["runs", str(make_run("z", seed=3).parent)])

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert columns <= set(printed.split())


NAMED = {"name": "wide", "tags": ["baseline", "english"]}


def test_a_run_has_its_name_and_tags_or_else_its_folder(make_run, capsys) -> None:
    make_run("a")
    run = make_run("b/c", record=NAMED)

    unnamed, named = overviews(run.parent.parent, capsys, "--sort", "folder")

    assert (unnamed["name"], unnamed["folder"], unnamed["tags"]) == ("a", "a", [])
    assert (named["name"], named["folder"]) == ("wide", "b/c")
    assert named["tags"] == ["baseline", "english"]
    assert named["changes"] == [], "a name is no setting"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--tag=english"], ["wide", "wide-2"]),
        (["--tag=english", "--tag=baseline"], ["wide"]),
        (["--tag=english,baseline"], ["wide"]),
    ],
)
def test_runs_are_filtered_by_all_given_tags(make_run, capsys, options, names) -> None:
    make_run("a")
    make_run("b", record={"name": "wide-2", "tags": ["english"]})
    run = make_run("c", record=NAMED)

    rows = overviews(run.parent, capsys, "--sort=name", *options)

    assert list(map(itemgetter("name"), rows)) == names


def test_a_tag_that_no_run_has_is_one_sentence(make_run, refusal) -> None:
    run = make_run("a", record=NAMED)

    error = refusal("runs", run.parent, "--tag", "german")

    assert "--tag german: none of 1 runs is tagged so: their tags are baseline, english" in error


@pytest.mark.parametrize("width", [80, 140])
def test_names_and_tags_are_in_the_table_at_any_width(
    make_run, capsys, monkeypatch, width: int
) -> None:
    """Of two runs of a name the folders are shown."""
    log(make_run("first", record=NAMED), "999,10240,5.5,0.001,2000,5.25")
    log(make_run("second", record={"name": "other"}, seed=2), "999,10240,5.5,0.001,2000,5.25")
    log(make_run("again", record={"name": "other"}), "999,10240,5.5,0.001,2000,5.25")
    monkeypatch.setattr("anlit.commands.runs.console", lambda: console_of(width))

    main(["runs", str(make_run("z").parent)])

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    first_words = re.findall(r"^(\S+).*finished", printed, re.MULTILINE)
    assert sorted(first_words) == ["again", "second", "wide", "z"]
    assert "baseline" in printed
    assert ("first" in printed) is (width == 140)


def console_of(width: int):
    from anlit.reporting.table import SafeConsole

    return SafeConsole(width=width)


def test_a_damaged_run_is_one_sentence(make_run, refusal) -> None:
    run = make_run("a")
    (run / "config.yaml").write_text("model: [")

    assert "config.yaml cannot be read" in refusal("runs", run.parent)


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path, refusal) -> None:
    assert "holds no run folder" in refusal("runs", tmp_path)
