"""Damaged and foreign files of run folders: every command names the file in a sentence."""

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.io.metrics_csv import read_rows
from anlit.io.read import check_content, read_json, read_yaml
from anlit.io.yaml_text import parse_scalar, parse_yaml
from anlit.study.read_study import read_study
from tests.checkpoints.foreign import trained


def nine_aliases(letter: str) -> str:
    return "[" + ", ".join([f"*{letter}"] * 9) + "]"


def expanding_aliases() -> str:
    """Return YAML with nine levels of nine aliases each."""
    lines = ["a: &a [x]"]
    for previous, letter in pairwise("abcdefghi"):
        lines.append(f"{letter}: &{letter} {nine_aliases(previous)}")
    return "\n".join(lines) + "\n"


def merges_of_merges() -> str:
    lines = ["a: &a {x: 1}"]
    for previous, letter in pairwise("abcdefghi"):
        lines.append(f"{letter}: &{letter} {{<<: {nine_aliases(previous)}}}")
    return "\n".join(lines) + "\n"


def chained_aliases() -> str:
    """Return YAML with 300 levels through aliases."""
    lines = ["a0: &a0 [1]"]
    for number in range(300):
        lines.append(f"a{number + 1}: &a{number + 1} [*a{number}]")
    return "\n".join(lines) + "\n"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def long_string() -> str:
    """Return YAML with 2,000 aliases of a string of 1,000,000 characters."""
    string = "x" * 1_000_000
    aliases = ", ".join(["*a"] * 2000)
    return f"a: &a {string}\nb: [{aliases}]\n"


BOMBS = {
    "aliases": expanding_aliases(),
    "nested": nested(60_000),
    "itself": "a: &a [*a]\n",
    "nul": "a: \0b",
    "chained": chained_aliases(),
    "long": long_string(),
}
"""YAML that a careless reader expands, follows for ever, or cannot parse."""
LONG_NUMBER = "9" * 1_000_000
HEADER = "step,val/tokens,val/loss\n"
DAMAGED_FILES = [
    ("run.json", '{"status": "fini'),
    ("run.json", "\0\0\0"),
    ("run.json", "[" * 60_000),
    ("run.json", '{"hardware": {"devices": 3}}'),
    ("run.json", '{"git": {"commit": ' + LONG_NUMBER + "}}"),
    ("metrics.csv", "[1, 2]\n3, 4\n"),
    ("metrics.csv", f"{HEADER}1,8,low\n"),
    ("metrics.csv", f"{HEADER}1,{LONG_NUMBER},2\n"),
    ("metrics.csv", f"{HEADER}1,2,3,4\n"),
    ("metrics.csv", f'{HEADER}"1,2,3\n'),
    ("metrics.csv", f"{HEADER}garbage\n2,8,3.5\n"),
    ("metrics.csv", f"{HEADER}1,8\n2,8,3.5\n"),
    ("metrics.csv", f"{HEADER}garbage,,\n2,8,3.5\n"),
    ("config.yaml", BOMBS["chained"]),
    ("config.yaml", BOMBS["nul"]),
]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("read"), "GPT")


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return Path(shutil.copytree(trained_run, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    ("name", "content"), DAMAGED_FILES, ids=lambda value: ascii(value[:20]).replace("\\", "")
)
def test_compare_names_a_damaged_file(
    name: str, content: str, run: Path, trained_run: Path, refusal
) -> None:
    (run / name).write_text(content)

    error = refusal("compare", run, trained_run, "--output", run / "out")

    assert f"{run / name} cannot be read (" in error
    assert len(error) < 600


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"status": "fini'),
        ("metrics.csv", "[1, 2]\n3, 4\n"),
        ("metrics.csv", f"{HEADER}garbage\n"),
    ],
)
def test_fit_continues_no_run_with_a_damaged_file(
    name: str, content: str, run: Path, refusal
) -> None:
    (run / name).write_text(content)

    error = refusal(
        "fit",
        f"--config={run}/config.yaml",
        f"--run_dir={run}",
        "--ckpt_path=last",
        "--trainer.max_steps=4",
    )

    assert f"{run / name} cannot be read (" in error


def test_a_number_with_an_exponent_needs_no_point() -> None:
    assert parse_yaml("[1e-3, 2E4, '1e-3', 1e]") == [1e-3, 2e4, "1e-3", "1e"]


def test_a_configuration_that_expands_too_far_is_refused(run: Path, refusal) -> None:
    config = run / "config.yaml"
    config.write_text(BOMBS["aliases"])

    assert f"{config} " in refusal("validate", f"--config={config}")
    assert f"{config} " in refusal("generate", run, "the", "--device", "cpu")


STUDY = """
title: T
seeds: [1]
shared: {configs: [run/config.yaml]}
arms: {gpt: {title: GPT+}}
baseline: gpt
"""


def test_a_study_names_damaged_launches(run: Path, refusal, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    Path("study.yaml").write_text(STUDY)
    study = read_study("study.yaml", None)
    (measuring_run,) = study.measuring_runs({"gpt": study.arms[0].points[0]})
    folder = Path("out") / measuring_run.name
    folder.mkdir(parents=True)
    (folder / "launches.json").write_text('[{"exit_code": "x"}]')

    error = refusal("study", "--config=study.yaml", "--output=out")

    assert "launches.json cannot be read (" in error


@pytest.mark.parametrize("content", ["{", '{"arms": [{"seconds_per_token": ["a"]}]}'])
def test_compare_names_damaged_timings(
    content: str, run: Path, trained_run: Path, tmp_path: Path, refusal
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "paired_steps.json").write_text(content)

    error = refusal("compare", trained_run, run, "--output", output)

    assert "paired_steps.json cannot be read (" in error
    assert "measure again with --measure_steps" in error


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


MakePath = Callable[[Path], object]
NOT_FILES = [os.mkfifo, make_endless, Path.mkdir]
"""Reading a pipe or /dev/zero never ends."""


@pytest.mark.parametrize("make", NOT_FILES)
def test_compare_reads_only_regular_files(
    make: MakePath, run: Path, trained_run: Path, tmp_path: Path, refusal
) -> None:
    metrics = run / "metrics.csv"
    metrics.unlink()
    make(metrics)

    error = refusal("compare", run, trained_run, "--output", tmp_path / "out")

    assert f"{metrics} cannot be read (it is not a regular file)" in error


COMMANDS = [
    "generate {run} --prompts {path} --device cpu",
    "generate {run} the --tokenizer {path} --device cpu",
    "generate {path} the --device cpu",
    "score {run} {path} --output {output} --device cpu",
    "fit --config={path}",
    "study --config {path}",
    "import {path} --output {output}",
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", NOT_FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_reads_only_regular_files(
    command: str, make: MakePath, trained_run: Path, tmp_path: Path, refusal
) -> None:
    path = tmp_path / "strange"
    make(path)
    output = tmp_path / "output.parquet"

    arguments = command.format(run=trained_run, path=path, output=output).split()

    assert str(path) in refusal(*arguments)


def test_merges_of_merges_do_not_multiply() -> None:
    assert parse_yaml(merges_of_merges()) == {letter: {"x": 1} for letter in "abcdefghi"}


@pytest.mark.parametrize("kind", BOMBS)
def test_yaml_that_expands_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BOMBS[kind])

    with pytest.raises(UserError, match=r"a\.yaml cannot be read"):
        read_yaml(tmp_path / "a.yaml")


def test_yaml_with_few_aliases_is_read() -> None:
    content = parse_yaml("a: &a [1, 2]\nb: {c: *a, d: {<<: {e: 3}}}\n")

    assert content == {"a": [1, 2], "b": {"c": [1, 2], "d": {"e": 3}}}


@pytest.mark.parametrize(
    ("value", "schema", "message"),
    [
        ({"a": {"b": [1]}}, {"a": {"b": [str]}}, "an entry of a.b is int in place of str"),
        ({"a": True}, {"a": (int, float)}, "a is bool in place of int or float"),
        ([], {"a": int}, "its content is list in place of dict"),
        ({"a": [None]}, {"a": [str]}, "an entry of a is empty"),
    ],
)
def test_a_schema_names_the_key_that_does_not_fit(
    value: object, schema: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_content(value, schema)


def test_a_mapping_may_lack_a_key_and_may_have_more() -> None:
    check_content({"a": None, "more": 3}, {"a": int, "b": str})


def test_json_of_a_few_levels_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([[[]]]))

    assert read_json(tmp_path / "a.json") == [[[]]]


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(nested(200))

    with pytest.raises(UserError, match="nested deeper than 100"):
        read_json(tmp_path / "a.json")


LINES_OF_OTHER_TEXT = {
    b"garbage\n": "line 3 does not have the 2 cells of the first line",
    b"\xff\xfe,1\n": "line 3 is not text in UTF-8",
    b"low,1\n": "line 3 has 'low' as step, which is not a number",
    b"inf,1\n": "line 3 has 'inf' as step, which is not a number",
    b'2,"1\n': "line 3: unexpected end of data",
}


@pytest.mark.parametrize(("line", "reason"), LINES_OF_OTHER_TEXT.items())
def test_a_line_that_is_no_row_of_metrics_is_named(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,val/loss\r\n1,2.5\r\n" + line + b"3,2.4\r\n")

    with pytest.raises(UserError) as refused:
        list(read_rows(path))

    assert f"{path} cannot be read ({reason})" in str(refused.value)


@pytest.mark.parametrize("step", ["", "-1", "2.5"])
def test_a_row_may_have_a_step_of_a_users_callback(step: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,own\n{step},2.5\n")

    assert list(read_rows(tmp_path / "metrics.csv")) == [{"step": step, "own": "2.5"}]


@pytest.mark.parametrize("torn", [b"3,2.4", b"3", b"3,2.4\r", b"\0\0\xff"])
def test_a_line_that_is_not_complete_is_left_out(torn: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"step,val/loss\n1,2.5\n" + torn)

    assert list(read_rows(tmp_path / "metrics.csv")) == [{"step": "1", "val/loss": "2.5"}]


@pytest.mark.parametrize(("text", "value"), [
    ("2M", 2_000_000), ("10B", 10_000_000_000), ("1.5k", 1500), ("10K", 10_000), ("1T", 10**12),
    ("1.0001k", "1.0001k"), ("2m", "2m"), ("M", "M"),
])  # fmt: skip
def test_a_count_may_have_a_suffix(text: str, value: object) -> None:
    assert parse_scalar(text) == value
