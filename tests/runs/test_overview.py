"""`anlit runs`: the table of runs."""

import json
import os
import re
from operator import itemgetter
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.reporting.table import SafeConsole
from anlit.runs.overview import SORT_KEYS, TAIL_BYTES

LOGGED = "step,train/tokens,train/loss,train/learning_rate,train/tokens_per_second,val/loss"
TRAINING_ROW = "9,10240,5.5,0.001,2000,"
VALIDATION_ROW = "9,,,,,5.25"
LAST_ROW = "19,20480,4.5,0.0005,2100,"


def log(run: Path, *rows: str) -> None:
    """Write metrics with these rows, each `step,tokens,loss,rate,speed,val_loss`."""
    (run / "metrics.csv").write_text("\n".join([LOGGED, *rows, ""]))


@pytest.fixture
def print_table(capsys, monkeypatch):
    """print_table(folder, width) → the output of `anlit runs` in a terminal of a width."""

    def run(folder: Path, width: int) -> str:
        monkeypatch.setattr("anlit.commands.runs.console", lambda: SafeConsole(width=width))
        main(["runs", str(folder)])
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= width
        return printed

    return run


def overviews(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict]:
    assert main(["runs", str(folder), "--json", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    return list(map(json.loads, lines))


def test_a_run_is_told_by_its_last_numbers(make_run, capsys) -> None:
    run = make_run("a", record={"status": "interrupted"})
    log(run, TRAINING_ROW, VALIDATION_ROW, LAST_ROW)
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
        "fault": None,
    }


def test_the_tokens_are_those_of_the_last_step_that_is_shown(make_run, capsys) -> None:
    """The last validation comes after the last logging step of many runs."""
    run = make_run("a")
    header = f"{LOGGED},val/tokens"
    (run / "metrics.csv").write_text(f"{header}\n{LAST_ROW},\n24,,,,,4.25,25600\n")

    (overview,) = overviews(run.parent, capsys)

    assert overview["step"] == 25
    assert overview["tokens"] == 25600


def test_changes_are_those_against_the_first_run(make_run, capsys) -> None:
    make_run("a", seed=1)
    run = make_run("b", seed=2, settings={"model.init_args.optimizer.init_args.lr": 0.004})

    _, overview = overviews(run.parent, capsys)

    assert set(overview["changes"]) == {"lr=0.004", "seed_everything=2"}


def test_one_odd_run_with_an_early_name_is_no_reference_for_the_others(make_run, capsys) -> None:
    rate = "model.init_args.optimizer.init_args.lr"
    odd = make_run("a", settings={"trainer.max_steps": 7, rate: 0.1})
    for seed in (1, 2):
        make_run(f"b{seed}", seed=seed)
    make_run("c", settings={rate: 0.004})

    changes = {run["name"]: set(run["changes"]) for run in overviews(odd.parent, capsys)}

    assert changes == {
        "a": {"max_steps=7", "lr=0.1"},
        "b1": set(),
        "b2": {"seed_everything=2"},
        "c": {"lr=0.004"},
    }


def test_a_run_without_metrics_is_listed(make_run, capsys) -> None:
    run = make_run("a")
    (run / "metrics.csv").unlink()

    (overview,) = overviews(run.parent, capsys)

    assert overview["step"] is None
    assert overview["val_loss"] is None


def test_only_the_end_of_long_metrics_is_read(make_run, capsys) -> None:
    run = make_run("a")
    long = ["1,10,9.0,0.1,1,9.0"] * TAIL_BYTES
    log(run, *long, LAST_ROW)

    (overview,) = overviews(run.parent, capsys)

    assert overview["step"] == 20
    assert overview["train_loss"] == 4.5


@pytest.mark.parametrize("garbage", ["garbage", "\udcff", "9,,,,,low", "low,,,,,"])
@pytest.mark.parametrize("n_rows", [1, TAIL_BYTES])
def test_a_run_with_damaged_metrics_is_marked(
    make_run, capsys, print_table, garbage: str, n_rows: int
) -> None:
    run = make_run("a")
    make_run("b", {100: 5.0})
    log(run, *[TRAINING_ROW] * n_rows)
    with (run / "metrics.csv").open("ab") as file:
        file.write(os.fsencode(f"{garbage}\n{LAST_ROW}\n"))

    assert main(["runs", str(run.parent), "--json"]) == 0
    printed = capsys.readouterr()

    overview, other = map(json.loads, printed.out.splitlines())
    problem = f"{run}/metrics.csv cannot be read (line {n_rows + 2} "
    assert problem in printed.err
    assert problem in overview["fault"]
    assert overview["train_loss"] is None
    assert other["val_loss"] == 5.0
    assert "a    finished, damaged " in print_table(run.parent, 80)


@pytest.mark.parametrize("key", SORT_KEYS)
def test_runs_are_sorted_and_those_without_a_value_come_last(make_run, capsys, key) -> None:
    losses = {"a": "4.0", "b": "3.0", "c": ""}
    for name, loss in losses.items():
        log(make_run(name), f"9,10,{loss},,,{loss}")
    without_metrics = make_run("d")

    rows = overviews(without_metrics.parent, capsys, "--sort", key)

    values = list(map(itemgetter(key), rows))
    n_missing = values.count(None)
    present = values[: len(values) - n_missing]
    assert None not in present
    assert present == sorted(present)


@pytest.mark.parametrize(
    ("width", "columns"), [(80, {"changes", "val"}), (140, {"rate", "tokens"})]
)
def test_the_table_fits_its_terminal(make_run, print_table, width, columns) -> None:
    for seed in (1, 2):
        run = make_run(f"a-run-with-a-long-name-{seed}", seed=seed)
        log(run, TRAINING_ROW, VALIDATION_ROW)
    other_run = make_run("z", seed=3)

    printed = print_table(other_run.parent, width)

    assert columns <= set(printed.split())


def test_changes_take_the_room_of_a_narrow_terminal_in_one_line(make_run, print_table) -> None:
    make_run("a")
    changes = {"model.init_args.optimizer.init_args.lr": 0.004, "trainer.max_steps": 50}
    run = make_run("a-run-with-a-long-name", seed=2, settings=changes)

    printed = print_table(run.parent, 80)

    (line,) = [line for line in printed.splitlines() if "long-name" in line]
    assert "lr=0.004" in line
    assert "max_steps=50" in line
    assert len(printed.splitlines()) == 6


def test_a_table_in_a_file_is_whole_also_if_columns_are_exported(
    make_run, capsys, monkeypatch
) -> None:
    changes = {"model.init_args.optimizer.init_args.lr": 0.004, "trainer.max_steps": 2000}
    for seed in (1, 2):
        log(make_run(f"a-run-with-a-name-{seed}", seed=seed, settings=changes), LAST_ROW)
    folder = make_run("z").parent
    widths = []
    for columns in ("", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        main(["runs", str(folder)])
        widths.append(max(map(len, capsys.readouterr().out.splitlines())))

    without_columns, with_columns = widths
    assert without_columns == with_columns > 80


NAMED = {"name": "wide", "tags": ["baseline", "english"]}


def test_a_run_has_its_name_and_tags_or_else_its_folder(make_run, capsys) -> None:
    make_run("a")
    run = make_run("b/c", record=NAMED)

    unnamed, named = overviews(run.parent.parent, capsys, "--sort", "folder")

    assert unnamed["name"] == "a"
    assert unnamed["folder"] == "a"
    assert unnamed["tags"] == []
    assert named["name"] == "wide"
    assert named["folder"] == "b/c"
    assert named["tags"] == ["baseline", "english"]
    assert named["changes"] == [], "a name is not a setting"


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
def test_names_and_tags_are_in_the_table_at_any_width(make_run, print_table, width: int) -> None:
    """Runs that share a name are shown by their folders."""
    same_name = {"name": "other"}
    named = make_run("first", record=NAMED)
    second = make_run("second", record=same_name, seed=2)
    again = make_run("again", record=same_name)
    for run in (named, second, again):
        log(run, TRAINING_ROW, VALIDATION_ROW)
    make_run("z")

    printed = print_table(named.parent, width)

    first_words = re.findall(r"^(\S+).*finished", printed, re.MULTILINE)
    assert sorted(first_words) == ["again", "second", "wide", "z"]
    assert "baseline" in printed
    assert ("first" in printed) is (width == 140)


def test_a_damaged_run_is_one_sentence(make_run, refusal) -> None:
    run = make_run("a")
    (run / "config.yaml").write_text("model: [")

    assert "config.yaml cannot be read" in refusal("runs", run.parent)


def test_a_folder_without_runs_is_one_sentence(tmp_path: Path, refusal) -> None:
    assert "holds no run folder" in refusal("runs", tmp_path)
