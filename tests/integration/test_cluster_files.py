"""Dockerfile, its pins, the Slurm script and Kubernetes' manifests: what can be told without an engine or a cluster."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from anlit.cli import COMMANDS
from anlit.shipped import FOLDER

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
ARGUMENTS = {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTORCH_JOB = yaml.safe_load((DOCKER / "kubernetes/pytorchjob.yaml").read_text())
REPLICAS = PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]
PODS = {name.lower(): replica["template"]["spec"] for name, replica in REPLICAS.items()}
PODS["job"] = yaml.safe_load((DOCKER / "kubernetes/job.yaml").read_text())["spec"]["template"]["spec"]
ELSEWHERE = {"torch", "torchvision", "cuda-bindings", "nvidia-cutlass-dsl-libs-cu12"}
"""Of torch's index, or left out on purpose."""
GLIBC = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def lines(name: str) -> list[str]:
    """A file's lines without comments."""
    return [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in lines(name))


@pytest.mark.parametrize(
    "command",
    [
        *(f"shellcheck {path.relative_to(ROOT)}" for path in (*DOCKER.glob("*.sh"), *DOCKER.glob("slurm/*"))),
        "hadolint --config .hadolint.yaml docker/Dockerfile",
        "kubernetes-validate --strict docker/kubernetes/job.yaml",
    ],
)
def test_linters_have_no_complaint(command: str) -> None:
    name, *_ = words = command.split()
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_constraints_satisfy_what_anlit_requires() -> None:
    pinned = {**pins("constraints.txt"), "torch": ARGUMENTS["TORCH_VERSION"]}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


def test_the_image_has_the_torch_of_the_virtual_environment_with_wheels_for_its_cuda() -> None:
    assert f"TORCH=${{TORCH:-{ARGUMENTS['TORCH_VERSION']}}}" in (DOCKER / "install.sh").read_text()
    toolkits = {(release, folder): toolkit for release, folder, toolkit in map(str.split, lines("torch-builds.txt"))}
    release = ARGUMENTS["TORCH_VERSION"].rpartition(".")[0]
    folder = ARGUMENTS["TORCH_INDEX"].rpartition("/")[2]
    assert (release, folder) in toolkits, f"torch {release} has no wheels in {folder}"
    for name in ("BASE", "DEVEL"):
        assert f"cuda:{toolkits[release, folder]}-" in ARGUMENTS[name]
    for other in re.findall(r"whl/(cu\d+)", (DOCKER / "README.md").read_text()):
        assert (release, other) in toolkits, f"docker/README.md names {other}"


def test_flash_attention_4_is_for_the_cuda_of_the_image() -> None:
    chosen = pins("flash-attn-4.txt")
    major = ARGUMENTS["TORCH_INDEX"].rpartition("/cu")[2][:2]
    assert f"nvidia-cutlass-dsl-libs-cu{major}" in chosen
    assert len({version for name, version in chosen.items() if name.startswith("nvidia-cutlass-dsl")}) == 1
    extras = PROJECT["optional-dependencies"].values()
    for requirement in (Requirement(text) for texts in extras for text in texts):
        if requirement.name in chosen:
            assert requirement.specifier.contains(chosen[requirement.name], prereleases=True), str(requirement)


def test_what_the_dockerfile_copies_reaches_the_engine() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(" ".join(copied).split()) <= allowed


def pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=ROOT, capture_output=True, text=True)
    if "NewConnectionError" in done.stderr:
        pytest.skip("the registry does not answer")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("python", "more"), [("3.11", ()), ("3.12", ("-r", "docker/flash-attn-4.txt"))])
def test_the_registry_has_every_package_and_none_is_missing(python: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """For the Python of the CPU image and of the CUDA image; of torch's CUDA wheels see the test above."""
    inline = re.findall(r"[\w-]+==[\d.]+(?=[ \\])", DOCKERFILE)
    assert len(inline) == 3
    options = ["--dry-run", "--report=-", "--quiet", "--ignore-installed", "--no-deps", "--only-binary=:all:"]
    options += [f"--python-version={python}", f"--target={tmp_path}", *(f"--platform={g}_x86_64" for g in GLIBC)]
    report = pip("install", *options, *inline, "-r", "docker/constraints.txt", *more)
    packages = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in json.loads(report)["install"]}
    surroundings = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for name, metadata in packages.items():
        for requirement in map(Requirement, metadata.get("requires_dist", ())):
            needed = canonicalize_name(requirement.name)
            if needed not in ELSEWHERE and (not requirement.marker or requirement.marker.evaluate(surroundings)):
                assert needed in packages, f"{name} needs {requirement}"
                assert requirement.specifier.contains(packages[needed]["version"], prereleases=True), str(requirement)
    if more:
        assert ARGUMENTS["FLASH_ATTN_VERSION"] in re.split(r"[\s,]+", pip("index", "versions", "flash-attn"))


def test_slurm_script_asks_for_what_its_text_relies_on() -> None:
    text = (DOCKER / "slurm/train.sbatch").read_text()
    options = set(re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--signal=SIGUSR1@90"} <= options
    assert text.index("\n#SBATCH") < text.index("\nset -uo"), "sbatch stops reading options at the first command"


@pytest.mark.parametrize("name", PODS)
def test_pod_runs_anlit_as_the_images_user_with_its_volumes(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == int(ARGUMENTS["UID"])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"data": "/workspace/data", "runs": "/workspace/runs", "shm": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounted.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    command, *options = container["args"]
    assert command in COMMANDS
    files = [option.removeprefix("--config=") for option in options if option.startswith("--config=")]
    assert files
    assert all((FOLDER / file).is_file() for file in files)
    assert container["image"].endswith(f":{PROJECT['version']}")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert {f"--trainer.devices={gpus}", "--ckpt_path=last"} <= set(options)


def test_pytorch_job_counts_its_nodes_and_processes() -> None:
    (container,) = PODS["master"]["containers"]
    nodes = sum(replica["replicas"] for replica in REPLICAS.values())
    assert f"--trainer.num_nodes={nodes}" in container["args"]
    assert PYTORCH_JOB["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert container["name"] == "pytorch", "the operator looks for a container of this name"
    assert container["command"][0] == "torchrun"
