"""Damaged and foreign files of run folders: one sentence that names the file, whatever is in it, in every command."""

import json
import os
import shutil
from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.io.read import check, parse_yaml, read_json, read_rows, read_yaml
from anlit.study.read_study import read_study
from tests.checkpoints.foreign import trained

NINE_TIMES = {
    b: f"[{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
}
BOMBS = {
    "aliases": "a: &a [x]\n" + "".join(f"{b}: &{b} {nine}\n" for b, nine in NINE_TIMES.items()),
    "nested": "[" * 60_000 + "]" * 60_000, "itself": "a: &a [*a]\n", "nul": "a: \0b",
    "chained": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(300)),
    "long": "a: &a " + "x" * 1_000_000 + f"\nb: [{', '.join(['*a'] * 2000)}]\n",
}  # fmt: skip
FIELD = "9" * 1_000_000
HEADER = "step,val/tokens,val/loss\n"
DAMAGED = {
    "run.json": {
        "interrupted": '{"status": "fini', "nul": "\0\0\0", "nested": "[" * 60_000,
        "kinds": '{"hardware": {"devices": 3}}', "field": '{"git": {"commit": ' + FIELD + "}}",
    },
    "metrics.csv": {
        "json": "[1, 2]\n3, 4\n", "word": f"{HEADER}1,8,low\n", "field": f"{HEADER}1,{FIELD},2\n",
        "wide": f"{HEADER}1,2,3,4\n", "quoted": f'{HEADER}"1,2,3\n',
    },
    "config.yaml": {name: BOMBS[name] for name in ("chained", "nul")},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("read"), "GPT")


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained_run, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in DAMAGED.items() for kind in kinds]
)
def test_compare_names_a_damaged_file(
    name: str, kind: str, run: Path, trained_run: Path, refusal
) -> None:
    (run / name).write_text(DAMAGED[name][kind])
    said = refusal("compare", run, trained_run, "--output", run / "out")
    assert f"{run / name} cannot be read (" in said
    assert len(said) < 600


@pytest.mark.parametrize(("name", "kind"), [("run.json", "interrupted"), ("metrics.csv", "json")])
def test_fit_continues_no_run_with_a_damaged_file(name: str, kind: str, run: Path, refusal) -> None:
    (run / name).write_text(DAMAGED[name][kind])
    fit = [
        "fit",
        f"--config={run}/config.yaml",
        f"--run_dir={run}",
        "--ckpt_path=last",
        "--trainer.max_steps=4",
    ]
    assert f"{run / name} cannot be read (" in refusal(*fit)


def test_a_number_without_a_point_is_one() -> None:
    assert parse_yaml("[1e-3, 2E4, '1e-3', 1e]") == [1e-3, 2e4, "1e-3", "1e"]


def test_a_config_that_expands_too_far_is_refused(run: Path, refusal) -> None:
    (run / "config.yaml").write_text(BOMBS["aliases"])
    for command in (
        ["validate", f"--config={run}/config.yaml"],
        ["generate", run, "the", "--device", "cpu"],
    ):
        assert f"{run / 'config.yaml'} " in refusal(*command)


STUDY = "title: T\nseeds: [1]\nshared: {configs: [run/config.yaml]}\narms: {gpt: {title: GPT+}}\nbaseline: gpt\n"


@pytest.mark.parametrize("content", ["[", "{}", '[{"exit_code": "x"}]'])
def test_a_study_names_damaged_launches(content: str, run: Path, refusal, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    Path("study.yaml").write_text(STUDY)
    study = read_study("study.yaml", None)
    folder = Path("out") / study.measuring_runs({"gpt": study.arms[0].points[0]})[0].name
    folder.mkdir(parents=True)
    (folder / "launches.json").write_text(content)
    assert "launches.json cannot be read (" in refusal(
        "study", "--config=study.yaml", "--output=out"
    )


@pytest.mark.parametrize("content", ["{", '{"arms": [{"seconds_per_token": ["a"]}]}'])
def test_compare_names_damaged_timings(
    content: str, run: Path, trained_run: Path, tmp_path: Path, refusal
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "paired_steps.json").write_text(content)
    said = refusal("compare", trained_run, run, "--output", tmp_path / "out")
    assert "paired_steps.json cannot be read (" in said
    assert "measure again with --measure_steps" in said


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_not_read(
    make, run: Path, trained_run: Path, tmp_path: Path, refusal
) -> None:
    """Without the check the first two never end."""
    (run / "metrics.csv").unlink()
    make(run / "metrics.csv")
    said = refusal("compare", run, trained_run, "--output", tmp_path / "out")
    assert f"{run / 'metrics.csv'} cannot be read (it is no regular file)" in said
    make(path := tmp_path / "strange")
    for command in (
        ["generate", trained_run, "--prompts", path, "--device", "cpu"],
        ["generate", trained_run, "the", "--tokenizer", path, "--device", "cpu"],
        ["generate", path, "the", "--device", "cpu"],
        ["score", trained_run, path, "--output", tmp_path / "scores.parquet", "--device", "cpu"],
        ["fit", f"--config={path}"], ["study", "--config", path], ["import", path, "--output", tmp_path / "imported"],
    ):  # fmt: skip
        assert str(path) in refusal(*command)


def test_merges_of_merges_do_not_multiply() -> None:
    merges = "a: &a {x: 1}\n" + "".join(
        f"{b}: &{b} {{<<: {nine}}}\n" for b, nine in NINE_TIMES.items()
    )
    assert parse_yaml(merges) == {key: {"x": 1} for key in "abcdefghi"}


@pytest.mark.parametrize("kind", BOMBS)
def test_yaml_that_expands_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BOMBS[kind])
    with pytest.raises(UserError, match=r"a\.yaml cannot be read"):
        read_yaml(tmp_path / "a.yaml")
    assert parse_yaml("a: &a [1, 2]\nb: {c: *a, d: {<<: {e: 3}}}\n") == {
        "a": [1, 2],
        "b": {"c": [1, 2], "d": {"e": 3}},
    }


@pytest.mark.parametrize(("value", "schema", "said"), [
    ({"a": {"b": [1]}}, {"a": {"b": [str]}}, "an entry of a.b is int in place of str"),
    ({"a": True}, {"a": (int, float)}, "a is bool in place of int or float"),
    ([], {"a": int}, "its content is list in place of dict"), ({"a": [None]}, {"a": [str]}, "an entry of a is empty"),
])  # fmt: skip
def test_a_schema_names_the_part(value: object, schema: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(value, schema)
    check({"a": None, "more": 3}, {"a": int, "b": str})


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(nested := [[[]]]))
    assert read_json(tmp_path / "a.json") == nested
    (tmp_path / "a.json").write_text("[" * 200 + "]" * 200)
    with pytest.raises(UserError, match="nested deeper than 100"):
        read_json(tmp_path / "a.json")


def test_the_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/loss\n1,2.5\n3,2.4")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": "1", "val/loss": "2.5"}]
