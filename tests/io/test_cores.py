"""The cores that a container's quota leaves, from files as Linux writes them."""

import os
from pathlib import Path

import pytest
import torch

from anlit.cli import main
from anlit.commands import cpu_threads
from anlit.errors import UserError
from anlit.io import cores as cores_module
from anlit.io.cores import cores, cpu_quota

VERSION_2 = {"jobs/train/cpu.max": "250000 100000\n"}
INNER_WITHOUT_LIMIT = {"jobs/cpu.max": "400000 100000\n", "jobs/train/cpu.max": "max 100000\n"}
OUTER_IS_LOWER = {"jobs/cpu.max": "50000 100000\n", "jobs/train/cpu.max": "400000 100000\n"}
SEEN_AS_ROOT = {"cpu.max": "300000 100000\n"}
VERSION_1 = {
    "cpu/jobs/train/cpu.cfs_quota_us": "150000\n",
    "cpu/jobs/train/cpu.cfs_period_us": "50000\n",
}
VERSION_1_WITHOUT_LIMIT = {
    "cpu/jobs/train/cpu.cfs_quota_us": "-1\n",
    "cpu/jobs/train/cpu.cfs_period_us": "100000\n",
}
GROUP_OF_2 = "0::/jobs/train\n"
GROUPS_OF_1 = "5:memory:/other\n4:cpu,cpuacct:/jobs/train\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        pytest.param(GROUP_OF_2, VERSION_2, 2.5, id="version 2"),
        pytest.param(GROUP_OF_2, INNER_WITHOUT_LIMIT, 4, id="only the outer group is limited"),
        pytest.param(GROUP_OF_2, OUTER_IS_LOWER, 0.5, id="the outer limit is lower"),
        pytest.param(GROUP_OF_2, SEEN_AS_ROOT, 3, id="a container sees its group as the root"),
        pytest.param(GROUP_OF_2, {}, None, id="no limit"),
        pytest.param(GROUPS_OF_1, VERSION_1, 3, id="version 1"),
        pytest.param(GROUPS_OF_1, VERSION_1_WITHOUT_LIMIT, None, id="version 1 without limit"),
    ],
)
def test_the_lowest_quota_counts(
    groups: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    assert cpu_quota(tmp_path / "groups", tmp_path) == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "groups", tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "expected"), [(0.3, 1), (1.0, 1), (2.5, 3), (100.0, 8), (None, 8)]
)
def test_cores_are_the_lower_of_affinity_and_quota_rounded_up(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 8)
    monkeypatch.setattr(cores_module, "cpu_quota", lambda: quota)

    assert cores() == expected


@pytest.mark.parametrize(
    ("n_cores", "setting", "expected"),
    [(3, None, "3"), (3, "2", "2"), (8, None, None)],
    ids=["a quota", "the user's number", "no quota"],
)
def test_a_quota_limits_the_threads_unless_the_user_decides(
    n_cores: int, setting: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "cores", lambda: n_cores)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_threads, "_chosen_here", [])
    monkeypatch.setattr(os, "environ", {} if setting is None else {"OMP_NUM_THREADS": setting})

    cpu_threads.set_thread_defaults()

    assert os.environ.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(
    ("setting", "n_ranks", "expected"),
    [(None, 1, 6), (None, 2, 3), (None, 8, 1), ("5", 2, 5)],
    ids=["one rank", "two ranks", "more ranks than cores", "the user's number"],
)
def test_ranks_on_a_machine_share_the_threads_of_a_quota(
    setting: str | None, n_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "cores", lambda: 6)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_threads, "_chosen_here", [])
    monkeypatch.setattr(os, "environ", {} if setting is None else {"OMP_NUM_THREADS": setting})
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    cpu_threads.set_thread_defaults()

    cpu_threads.divide_threads(n_ranks)
    cpu_threads.divide_threads(n_ranks)  # a later Trainer of the same process

    assert os.environ["OMP_NUM_THREADS"] == str(expected)
    assert numbers == ([] if setting else [expected])


def test_a_command_divides_threads_among_the_ranks_of_its_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(n_ranks: int) -> None:
        raise UserError(f"threads for {n_ranks} ranks")

    monkeypatch.setattr("anlit.commands.fit.divide_threads", refuse)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=3", "--data.path=data"]

    exit_code = main(
        ["fit", "--model=GPT", "--data=TokenShards", f"--run_dir={tmp_path}", *options]
    )

    assert exit_code == 2
    assert "threads for 3 ranks" in capsys.readouterr().err
