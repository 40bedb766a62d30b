"""The pins of the CUDA image: torch has wheels for its CUDA, and every other package is in the registry."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
ARGUMENTS = {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE)}
ELSEWHERE = {"torch", "torchvision", "cuda-bindings", "nvidia-cutlass-dsl-libs-cu12"}
"""Of torch's index, or left out on purpose."""
PLATFORMS = [
    f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
]


def lines(name: str) -> list[str]:
    """A file's lines without comments."""
    return [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in lines(name))


def test_torch_has_wheels_for_the_cuda_of_the_image() -> None:
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
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in (Requirement(text) for texts in extras.values() for text in texts):
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
    files = ["-r", "docker/constraints.txt", *more]
    options = ["--dry-run", "--report=-", "--quiet", "--ignore-installed", "--no-deps", "--only-binary=:all:"]
    target = [f"--python-version={python}", f"--target={tmp_path}", *PLATFORMS]
    report = pip("install", *options, *target, *inline, *files)
    packages = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in json.loads(report)["install"]}
    surroundings = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for name, metadata in packages.items():
        for requirement in map(Requirement, metadata.get("requires_dist", ())):
            needed = canonicalize_name(requirement.name)
            if needed in ELSEWHERE or (requirement.marker and not requirement.marker.evaluate(surroundings)):
                continue
            assert needed in packages, f"{name} needs {requirement}"
            version = packages[needed]["version"]
            assert requirement.specifier.contains(version, prereleases=True), f"{name} needs {requirement}: {version}"
    if more:
        assert ARGUMENTS["FLASH_ATTN_VERSION"] in re.split(r"[\s,]+", pip("index", "versions", "flash-attn"))
