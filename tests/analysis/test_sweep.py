"""Grids become runs, finished runs are kept, the table tells what was run."""

import json
from pathlib import Path

import pytest

from anlit.analysis.sweep import Point, main, read_points, table
from anlit.errors import UserError

SWEEP = """
arms:
  a:
    configs: [one.yaml]
    grids:
      - {model.lr: [0.1, 0.2], model.depth: [1, 2]}
      - {model.lr: 0.1, model.depth: 2}
"""


def finished(folder: Path, loss: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {class_path: anlit.GPT, init_args: {}}\n")
    (folder / "run.json").write_text(json.dumps({"status": "finished"}))
    (folder / "metrics.csv").write_text(f"step,val/loss,val/tokens,val/seconds\n1,9.0,10,1.0\n2,{loss},20,2.0\n")


def test_a_grid_is_its_product_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    names = sorted(point.name for point in read_points(str(tmp_path / "sweep.yaml")))
    assert names == ["a_depth=1_lr=0.1", "a_depth=1_lr=0.2", "a_depth=2_lr=0.1", "a_depth=2_lr=0.2"]


def test_the_command_continues_where_a_run_was_cut(tmp_path: Path) -> None:
    command = Point("a", ("one.yaml",), (("model.lr", 0.1),)).command(tmp_path / "run")
    assert command[2:] == [
        "anlit", "fit", "--config", "one.yaml", "--model.lr=0.1", f"--run_dir={tmp_path}/run", "--ckpt_path=last",
    ]  # fmt: skip


def test_the_table_has_final_losses_best_first_and_says_what_did_not_run(tmp_path: Path) -> None:
    points = [Point("a", (), (("model.lr", rate),)) for rate in (0.1, 0.2, 0.3)]
    finished(tmp_path / points[0].name, 3.5)
    finished(tmp_path / points[1].name, 3.25)
    rows = table(points, tmp_path).splitlines()[2:]
    assert rows == ["| a | lr 0.2 | 3.2500 |", "| a | lr 0.1 | 3.5000 |", "| a | lr 0.3 | not run |"]


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep.yaml").write_text("arms: {a: {configs: [x.yaml], grids: [{model.lr: [0.1]}]}}")
    finished(tmp_path / "runs" / "a_lr=0.1", 3.0)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("a finished run was started again"))
    assert main([str(tmp_path / "sweep.yaml"), "--output", str(tmp_path / "runs")]) == 0
    assert "3.0000" in (tmp_path / "runs" / "sweep.md").read_text()


def test_a_missing_file_and_an_incomplete_arm_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.yaml does not exist"):
        read_points(str(tmp_path / "no.yaml"))
    (tmp_path / "sweep.yaml").write_text("arms: {a: {configs: []}}")
    with pytest.raises(UserError, match="'configs' and 'grids'"):
        read_points(str(tmp_path / "sweep.yaml"))
