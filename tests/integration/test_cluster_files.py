"""The Dockerfile, its pins, the Slurm script and Kubernetes' manifests, without a cluster."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from anlit.config.files import FOLDER
from anlit.errors import PREEMPTED

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r'^ARG (\w+)="?(.*?)"?$', DOCKERFILE, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTORCH_JOB = yaml.safe_load((DOCKER / "kubernetes/pytorchjob.yaml").read_text())
JOB = yaml.safe_load((DOCKER / "kubernetes/job.yaml").read_text())
REPLICAS = PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]
TEMPLATES = {
    "job": JOB["spec"]["template"],
    "master": REPLICAS["Master"]["template"],
    "worker": REPLICAS["Worker"]["template"],
}
SLURM = (DOCKER / "slurm/train.sbatch").read_text()


def lines(name: str) -> list[str]:
    """A file's lines without comments."""
    all_lines = (DOCKER / name).read_text().splitlines()
    return [line for line in all_lines if not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    """Packages and versions of a file of requirements."""
    return dict(line.split("==") for line in lines(name))


@pytest.mark.parametrize(
    "script", sorted([*DOCKER.glob("*.sh"), *DOCKER.glob("slurm/*")]), ids=lambda path: path.name
)
def test_scripts_have_no_complaint(script: Path) -> None:
    """Shellcheck has none where it is installed. `make image-check` runs hadolint."""
    command = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    result = subprocess.run([*command, script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_pins_satisfy_the_requirements_of_anlit() -> None:
    versions = pins("constraints.txt") | {"torch": ARGUMENTS["TORCH_VERSION"]}

    for requirement in map(Requirement, PROJECT["dependencies"]):
        version = versions[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, str(requirement)


def test_pins_of_flash_attention_4_satisfy_the_extras_of_anlit() -> None:
    versions = pins("flash-attn-4.txt")
    extras = chain(*PROJECT["optional-dependencies"].values())

    n_pinned = 0
    for requirement in map(Requirement, extras):
        version = versions.get(requirement.name)
        if version is not None:
            n_pinned += 1
            assert requirement.specifier.contains(version, prereleases=True), str(requirement)
    assert n_pinned > 0


def test_flash_attention_4_is_for_the_cuda_of_the_image() -> None:
    versions = pins("flash-attn-4.txt")
    _, _, cuda = ARGUMENTS["TORCH_INDEX"].rpartition("/cu")
    major = cuda[:2]

    cutlass = {name for name in versions if name.startswith("nvidia-cutlass-dsl")}

    assert f"nvidia-cutlass-dsl-libs-cu{major}" in cutlass
    assert len({versions[name] for name in cutlass}) == 1


def read_toolkits() -> dict[tuple[str, str], str]:
    """The CUDA toolkit of torch's wheels, by release and folder."""
    toolkits = {}
    for line in lines("torch-builds.txt"):
        release, folder, toolkit = line.split()
        toolkits[release, folder] = toolkit
    return toolkits


def test_the_image_has_the_torch_of_the_virtual_environment() -> None:
    version = ARGUMENTS["TORCH_VERSION"]

    installer = (DOCKER / "install.sh").read_text()

    assert f"TORCH=${{TORCH:-{version}}}" in installer


def test_the_torch_of_the_image_has_wheels_for_its_cuda() -> None:
    toolkits = read_toolkits()
    release, _, _ = ARGUMENTS["TORCH_VERSION"].rpartition(".")
    _, _, folder = ARGUMENTS["TORCH_INDEX"].rpartition("/")
    assert (release, folder) in toolkits, f"torch {release} has no wheels in {folder}"

    toolkit = toolkits[release, folder]
    assert f"cuda:{toolkit}-" in ARGUMENTS["BASE"]
    assert f"cuda:{toolkit}-" in ARGUMENTS["DEVEL"]

    page = (DOCKER / "README.md").read_text()
    for folder_of_page in re.findall(r"whl/(cu\d+)", page):
        assert (release, folder_of_page) in toolkits, f"docker/README.md names {folder_of_page}"


def test_what_the_dockerfile_copies_reaches_the_engine() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text()
    allowed = re.findall("^!(.*)$", ignored, re.MULTILINE)

    names = set(" ".join(copied).split())

    assert names <= set(allowed)


def test_slurm_script_asks_for_what_its_text_relies_on() -> None:
    """`make slurm-check` runs it under a real Slurm: pre-empted, requeued, cancelled, killed."""
    options = set(re.findall(r"^#SBATCH (\S+)$", SLURM, re.MULTILINE))

    options_begin = SLURM.index("\n#SBATCH")
    commands_begin = SLURM.index("\nset -uo")
    assert {"--requeue", "--open-mode=append", "--signal=SIGUSR1@90"} <= options
    assert options_begin < commands_begin, "sbatch stops reading options at the first command"
    assert f"\nPREEMPTED={PREEMPTED}\n" in SLURM
    assert "((${SLURM_RESTART_COUNT:-0} < ${ANLIT_MAX_RESTARTS:-1000}))" in SLURM


MOUNTS = {"ANLIT_MOUNTS": "/big/data,/big/texts"}
ARRAY_TASK = {"SLURM_ARRAY_JOB_ID": "31400", "SLURM_ARRAY_TASK_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "job", "started"),
    [
        ({}, "31415", "--cpus-per-task=1 .venv/bin/anlit"),
        # Slurm would requeue all tasks of an array by the array's own number.
        (
            {"ANLIT_IMAGE": "anlit.sif"} | MOUNTS | ARRAY_TASK,
            "31400_7",
            "--cpus-per-task=1 apptainer exec --nv "
            "--bind /here:/here,/big/data:/big/data,/big/texts:/big/texts --pwd /here "
            "anlit.sif anlit",
        ),
        (
            {"ANLIT_IMAGE": "anlit.sqsh"} | MOUNTS,
            "31415",
            "--cpus-per-task=1 --container-image=anlit.sqsh --container-workdir=/here "
            "--container-mounts=/here:/here,/big/data:/big/data,/big/texts:/big/texts anlit",
        ),
    ],
    ids=["environment", "apptainer, array", "pyxis"],
)
def test_slurm_script_names_the_job_and_starts_it_in_its_image(
    environment: dict, job: str, started: str
) -> None:
    named = SLURM[SLURM.index("\njob=") : SLURM.index("\n# Where the processes meet")]
    launch = SLURM[SLURM.index("\nmounts=") : SLURM.index("\nesac") + 5]
    variables = {"SLURM_JOB_ID": "31415", **environment}
    script = f'PWD=/here\n{named}\n{launch}\necho "$job ${{step[*]}} ${{launch[*]}}"'

    printed = subprocess.check_output(["bash", "-uc", script], env=variables, text=True)

    assert printed == f"{job} {started}\n"


@pytest.mark.parametrize("torch", ["", "2.14.0", "2.13.0+cu129"])
def test_extras_leave_torch_alone_and_torchvision_out(torch: str, tmp_path: Path) -> None:
    """The packages in pip's report. `make install` and `make image-check` run all of it."""
    installer = (DOCKER / "install.sh").read_text()
    (script,) = re.findall(r"<< 'PYTHON'\n(.*?)\nPYTHON\n", installer, re.DOTALL)
    packages = {"sacrebleu": "2.5.1", "torchvision": "0.28.0", "anlit": "0.1.0"}
    if torch:
        packages["torch"] = torch
    installs = []
    for name, version in packages.items():
        installs.append({"metadata": {"name": name, "version": version}})
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": installs}))

    result = subprocess.run([sys.executable, "-c", script, report], capture_output=True, text=True)

    if torch:
        assert result.returncode != 0
        assert f"pip would replace torch by {torch}" in result.stderr
    else:
        assert result.returncode == 0
        assert result.stdout == "sacrebleu==2.5.1\n"


@pytest.mark.parametrize("name", TEMPLATES)
def test_pod_runs_anlit_as_the_images_user_with_its_volumes(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == int(ARGUMENTS["UID"])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"data": "/workspace/data", "runs": "/workspace/runs", "shm": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounted.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    command, *options = container["args"]
    assert command == "fit"
    files = re.findall(r"--config=(\S+)", " ".join(options))
    assert files
    for file in files:
        assert (FOLDER / file).is_file()
    assert container["image"].endswith(f":{PROJECT['version']}")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert {f"--trainer.devices={gpus}", "--ckpt_path=last"} <= set(options)
    if name != "job":
        nodes = REPLICAS["Master"]["replicas"] + REPLICAS["Worker"]["replicas"]
        assert f"--trainer.num_nodes={nodes}" in options
        assert PYTORCH_JOB["spec"]["nprocPerNode"] == str(gpus)
        assert container["name"] == "pytorch", "the operator looks for a container of this name"
        assert container["command"][0] == "torchrun"
