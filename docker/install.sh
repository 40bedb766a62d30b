#!/bin/sh
# Installs anlit into $VENV, and again with extras: torch first, and never torchvision. litdata asks for torchvision and
# does not need it; one that does not fit the build of torch keeps lightning from being imported, even for the moment
# until it is removed. So pip only says what it would install, and of that everything else is installed as listed.
# Usage: PYTHON=python3 VENV=.venv TORCH_BUILD=cpu|cuda sh docker/install.sh [extras]
set -eu
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH_BUILD=${TORCH_BUILD:-cpu} TORCH=${TORCH:-2.13.0}
extras=${1:-}
cd "$(dirname "$0")/.."

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "anlit needs Python 3.11 or newer, and $PYTHON is $("$PYTHON" --version 2>&1): set PYTHON=/path/to/python3.11" >&2
    exit 2
}
[ -x "$VENV/bin/python" ] || { echo "== making $VENV"; "$PYTHON" -m venv "$VENV"; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The CPU build of torch, from where pip is configured to look or from PyTorch's own index; pip's complaints are shown
# only if neither has it.
install_cpu_build() {
    pip install "torch==$TORCH+cpu" 2> "$scratch/first" && return
    echo "== pip finds no torch==$TORCH+cpu: asking https://download.pytorch.org/whl/cpu"
    pip install --retries 1 --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu" 2> "$scratch/second"
}

if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    echo "== installing torch $TORCH ($TORCH_BUILD)"
    if [ "$TORCH_BUILD" != cpu ] || [ "$(uname -s)" != Linux ]; then
        pip install "torch==$TORCH"
    elif ! install_cpu_build; then
        grep -h "^ERROR" "$scratch/first" "$scratch/second" >&2 || true
        echo "== there is no CPU build of torch $TORCH for $("$PYTHON" --version): installing the one of PyPI, which has" \
            "CUDA (about 3 GB to download, 5 GB on disk) and runs on a CPU too; or stop, and set PIP_FIND_LINKS to a" \
            "folder that holds the wheel of torch==$TORCH+cpu"
        pip install "torch==$TORCH"
    fi
fi

# As pip calls it: torch.__version__ may have a build (2.14.1+cu130) that the package's version has not.
"$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > "$scratch/constraints.txt"
echo "== installing anlit${extras:+ with $extras}"
pip install --quiet --dry-run --report "$scratch/report.json" -c "$scratch/constraints.txt" -e ".${extras:+[$extras]}"
"$VENV/bin/python" - "$scratch/report.json" > "$scratch/packages.txt" << 'PYTHON'
import json, sys
for package in json.load(open(sys.argv[1]))["install"]:
    name, version = package["metadata"]["name"], package["metadata"]["version"]
    if name.lower() == "torch":
        sys.exit(f"pip would replace torch by {version}: the installation of torch does not fit the extras asked for")
    if name.lower() not in ("anlit", "torchvision"):
        print(f"{name}=={version}")
PYTHON
if [ -s "$scratch/packages.txt" ]; then pip install --no-deps -r "$scratch/packages.txt"; fi
pip install --quiet --no-deps -e .

"$VENV/bin/python" -c 'import anlit.commands.fit' || {
    echo "the installation in $VENV does not import: remove the folder $VENV and run the command again" >&2
    exit 1
}
