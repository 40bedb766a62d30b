"""docker/slurm/train.sbatch and docker/install.sh: what they start, with stand-ins for Slurm's commands and for pip.

`make slurm-check` and `make image-check` run them with the real ones.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
JOB = {
    "SLURM_JOB_ID": "31415", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "16",
    "SLURM_CPUS_PER_TASK": "12", "ANLIT_MAX_RESTARTS": "3",
}  # fmt: skip
SLURM = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"\n[ "$1" != show ] || printf "node1\nnode2\n"',
    "srun": 'echo "$MASTER_ADDR $MASTER_PORT srun $*" >> "$CALLS"\nexit "${STATUS:-0}"',
}


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def slurm_job(folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Run the script as Slurm would, on two nodes of eight GPUs; its exit code and the calls of Slurm's commands."""
    for name, body in SLURM.items():
        executable(folder / name, f"#!/bin/sh\n{body}\n")
    environment = JOB | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")} | environment
    command = ["bash", str(DOCKER / "slurm/train.sbatch"), "--config", "a b.yaml", "--run_dir", "runs/x"]
    status = subprocess.run(command, cwd=folder, env=environment, timeout=60).returncode
    return status, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("status", "environment", "requeued"),
    [
        *((status, {}, "") for status in (0, 1, 2, 137)),
        (75, {}, "31415"),
        (75, {"SLURM_RESTART_COUNT": "2"}, "31415"),
        (75, {"SLURM_RESTART_COUNT": "3"}, ""),
        # by the array's own number, Slurm would requeue all of its tasks
        (75, {"SLURM_ARRAY_JOB_ID": "31415", "SLURM_ARRAY_TASK_ID": "7"}, "31415_7"),
    ],
)
def test_a_job_goes_on_from_its_last_checkpoint_and_requeues_itself_only_after_a_preemption(
    tmp_path: Path, status: int, environment: dict[str, str], requeued: str
) -> None:
    code, lines = slurm_job(tmp_path, STATUS=str(status), **environment)
    (step,) = (line for line in lines if " srun " in line)
    options = "--trainer.num_nodes=2 --trainer.devices=8 --ckpt_path last"
    assert code == status
    assert step.startswith(f"node1 {20000 + 31415 % 20000} srun --wait=30 ")
    assert step.endswith(f".venv/bin/anlit fit --config a b.yaml --run_dir runs/x {options}")
    assert [line for line in lines if "requeue" in line] == ([f"scontrol requeue {requeued}"] if requeued else [])


@pytest.mark.parametrize(
    ("image", "started"),
    [
        ("anlit.sif", "apptainer exec --nv --bind /big/data:/workspace/data --bind /big/runs:/workspace/runs "
                      "--pwd /workspace anlit.sif anlit fit"),
        ("anlit.sqsh", "--container-image=anlit.sqsh --container-workdir=/workspace "
                       "--container-mounts=/big/data:/workspace/data,/big/runs:/workspace/runs anlit fit"),
    ],
)  # fmt: skip
def test_an_image_gets_data_and_runs(tmp_path: Path, image: str, started: str) -> None:
    _, calls = slurm_job(tmp_path, ANLIT_IMAGE=image, ANLIT_DATA="/big/data", ANLIT_RUNS="/big/runs")
    assert started in calls[-1]


PYTHON = f"""#!{sys.executable}
import json, os, sys
arguments = sys.argv[1:]
if arguments[:2] == ["-m", "pip"]:
    if "--dry-run" in arguments:
        open(arguments[arguments.index("--report") + 1], "w").write(os.environ["PIP_REPORT"])
    else:
        asked = [open(a).read().split() if a.endswith(".txt") else a for a in arguments[2:]]
        open(os.environ["PIP_LOG"], "a").write(json.dumps(asked) + "\\n")
elif arguments[:1] == ["-"]:  # the script on standard input
    sys.argv = arguments
    exec(compile(sys.stdin.read(), "install.sh", "exec"))
elif "print(" in arguments[1]:
    print("torch==2.13.0+cpu")
"""


@pytest.mark.parametrize("torch", ["", "2.14.0", "2.13.0+cu129"])
def test_extras_leave_torch_alone_and_torchvision_out(tmp_path: Path, torch: str) -> None:
    executable(tmp_path / "venv" / "bin" / "python", PYTHON)
    log = tmp_path / "pip.log"
    log.touch()
    packages = {"sacrebleu": "2.5.1", "torchvision": "0.28.0", "anlit": "0.1.0"} | ({"torch": torch} if torch else {})
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages.items()]}
    given = {"PYTHON": sys.executable, "VENV": str(tmp_path / "venv"), "PIP_LOG": str(log)}
    environment = os.environ | given | {"PIP_REPORT": json.dumps(report)}
    command = ["sh", str(DOCKER / "install.sh"), "eval"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    if torch:
        assert done.returncode != 0
        assert f"pip would replace torch by {torch}" in done.stderr
        assert asked == []
        return
    assert done.returncode == 0, done.stderr
    first, last = asked
    assert (first[-1], "--no-deps" in first) == (["sacrebleu==2.5.1"], True)
    assert last[-3:] == ["--no-deps", "-e", "."]
