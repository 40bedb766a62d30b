"""docker/slurm/train.sbatch with stand-ins for Slurm's commands: what it starts, and when it requeues itself."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/slurm/train.sbatch"
PREEMPTED = 75
JOB = {
    "SLURM_JOB_ID": "31415",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "16",
    "SLURM_CPUS_PER_TASK": "12",
}
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"\n[ "$1" != show ] || printf "node1\\nnode2\\n"',
    "scancel": 'echo "scancel $*" >> "$CALLS"',
    "srun": 'echo "$MASTER_ADDR $MASTER_PORT srun $*" >> "$CALLS"\nsleep "${SECONDS_TO_RUN:-0}"\nexit "${STATUS:-0}"',
}


def job(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the script as Slurm would, on two nodes of eight GPUs."""
    folder.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environment = JOB | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")} | environment
    command = ["bash", str(SCRIPT), "--config", "a b.yaml", "--run_dir", "runs/x"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def run(folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Exit code of the script and the calls of Slurm's commands that it made."""
    process = job(folder, **environment)
    process.communicate(timeout=30)
    return process.returncode, (folder / "calls").read_text().splitlines()


def test_starts_one_process_for_each_gpu_and_continues_the_last_checkpoint(tmp_path: Path) -> None:
    status, calls = run(tmp_path)
    assert status == 0
    step = next(call for call in calls if " srun " in call)
    assert step.startswith(f"node1 {20000 + 31415 % 20000} srun --wait=30 ")
    assert step.endswith(
        ".venv/bin/anlit fit --config a b.yaml --run_dir runs/x "
        "--trainer.num_nodes=2 --trainer.devices=8 --ckpt_path last"
    )


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (2, False), (137, False), (PREEMPTED, True)])
def test_requeues_only_after_a_preemption(tmp_path: Path, status: int, requeued: bool) -> None:
    code, calls = run(tmp_path, STATUS=str(status))
    assert code == status
    assert ("scontrol requeue 31415" in calls) == requeued


def test_a_job_that_is_preempted_for_ever_ends(tmp_path: Path) -> None:
    for restarts, requeued in (("2", True), ("3", False)):
        folder = tmp_path / restarts
        environment = {"SLURM_RESTART_COUNT": restarts, "ANLIT_MAX_RESTARTS": "3"}
        code, calls = run(folder, STATUS=str(PREEMPTED), **environment)
        assert code == PREEMPTED
        assert ("scontrol requeue 31415" in calls) == requeued


def test_apptainer_and_pyxis_get_the_image_with_data_and_runs(tmp_path: Path) -> None:
    places = {"ANLIT_DATA": "/big/data", "ANLIT_RUNS": "/big/runs"}
    _, calls = run(tmp_path / "apptainer", ANLIT_IMAGE="/images/anlit.sif", **places)
    assert (
        "apptainer exec --nv --bind /big/data:/workspace/data --bind /big/runs:/workspace/runs --pwd /workspace "
        "/images/anlit.sif anlit fit" in calls[-1]
    )
    _, calls = run(tmp_path / "pyxis", ANLIT_IMAGE="/images/anlit.sqsh", **places)
    assert (
        "--container-image=/images/anlit.sqsh --container-workdir=/workspace "
        "--container-mounts=/big/data:/workspace/data,/big/runs:/workspace/runs anlit fit" in calls[-1]
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_shell_outlives_the_processes_and_requeues_unless_slurm_ends_the_job(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = job(tmp_path, STATUS=str(PREEMPTED), SECONDS_TO_RUN="1")
    calls = tmp_path / "calls"
    while not (calls.is_file() and " srun " in calls.read_text()):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == PREEMPTED
    made = calls.read_text().splitlines()
    assert ("scancel --signal=USR1 31415" in made) == (number == signal.SIGUSR1)
    assert ("scontrol requeue 31415" in made) == (number == signal.SIGUSR1)


def test_a_task_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    """One task of an array has the array's own number: by that, Slurm would requeue or signal all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "31415", "SLURM_ARRAY_TASK_ID": "7"}
    _, calls = run(tmp_path, STATUS=str(PREEMPTED), **array)
    assert "scontrol requeue 31415_7" in calls
