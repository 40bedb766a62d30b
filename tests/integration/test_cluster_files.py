"""Dockerfile, Slurm script and Kubernetes manifests: what can be told without an engine, a cluster or a registry.

`make image-check` and `make slurm-check` really build and run them.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from anlit.cli import COMMANDS
from anlit.shipped import FOLDER

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SCRIPTS = [*DOCKER.glob("*.sh"), *DOCKER.glob("slurm/*")]
JOB = yaml.safe_load((DOCKER / "kubernetes/job.yaml").read_text())
PYTORCH_JOB = yaml.safe_load((DOCKER / "kubernetes/pytorchjob.yaml").read_text())
REPLICAS = PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]
PODS = {"job": JOB["spec"]["template"]["spec"]} | {
    name.lower(): replica["template"]["spec"] for name, replica in REPLICAS.items()
}


def run_tool(name: str, *arguments: str | Path) -> None:
    """Run a linter on the repository's files, or skip where it is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([name, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_no_complaint(script: Path) -> None:
    run_tool("shellcheck", script)


def test_hadolint_has_no_complaint() -> None:
    run_tool("hadolint", "--config", ".hadolint.yaml", "docker/Dockerfile")


def test_job_keeps_to_kubernetes_schema() -> None:
    run_tool("kubernetes-validate", "--strict", "docker/kubernetes/job.yaml")


def test_constraints_satisfy_what_anlit_requires() -> None:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned["torch"] = docker_argument("TORCH_VERSION")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        version = pinned[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{requirement} and {version}"


def test_image_and_virtual_environment_have_the_same_torch() -> None:
    install = re.search(r"TORCH=\$\{TORCH:-(.+?)\}", (DOCKER / "install.sh").read_text())
    assert install is not None
    assert docker_argument("TORCH_VERSION") == install[1]


def docker_argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(.*)$", DOCKERFILE, re.MULTILINE)
    assert found is not None, f"the Dockerfile has no argument {name}"
    return found[1].strip('"')


def test_slurm_script_asks_for_what_its_text_relies_on() -> None:
    text = (DOCKER / "slurm/train.sbatch").read_text()
    options = set(re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--signal=SIGUSR1@90"} <= options
    assert "--ckpt_path last" in text
    assert text.index("\n#SBATCH") < text.index("\nset -uo"), "sbatch stops reading options at the first command"


@pytest.mark.parametrize("name", PODS)
def test_pod_runs_anlit_as_the_images_user_with_its_volumes(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == int(docker_argument("UID"))
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"data": "/workspace/data", "runs": "/workspace/runs", "shm": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"]["medium"] == "Memory"
    command, *options = container["args"]
    assert command in COMMANDS
    assert "--ckpt_path=last" in options
    files = [option.split("=", 1)[1] for option in options if option.startswith("--config=")]
    assert files
    assert all((FOLDER / file).is_file() for file in files)
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert container["image"].endswith(f":{version}")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--trainer.devices={gpus}" in options


def test_pytorch_job_counts_its_nodes_and_processes() -> None:
    (container,) = REPLICAS["Master"]["template"]["spec"]["containers"]
    nodes = sum(replica["replicas"] for replica in REPLICAS.values())
    assert f"--trainer.num_nodes={nodes}" in container["args"]
    assert PYTORCH_JOB["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert container["name"] == "pytorch", "the operator looks for a container of this name"
    assert container["command"][0] == "torchrun"
