#!/bin/sh
# Installs anlit into $VENV: torch first, then the rest under a constraint on torch's version, because litdata asks for
# any torchvision and pip would replace torch by the newest CUDA build to please it.
# Usage: PYTHON=python3 VENV=.venv TORCH_BUILD=cpu|cuda sh docker/install.sh [extras]
set -eu
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH_BUILD=${TORCH_BUILD:-cpu} TORCH=${TORCH:-2.13.0}
extras=${1:-}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "anlit needs Python 3.11 or newer, and $PYTHON is $("$PYTHON" --version 2>&1): set PYTHON=/path/to/python3.11" >&2
    exit 2
}
[ -x "$VENV/bin/python" ] || { echo "== making $VENV"; "$PYTHON" -m venv "$VENV"; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    echo "== installing torch $TORCH ($TORCH_BUILD)"
    if [ "$TORCH_BUILD" = cpu ] && [ "$(uname -s)" = Linux ]; then
        # The CPU build, from where pip is configured to look or from PyTorch's own index. Never a CUDA one: it is
        # gigabytes larger.
        pip install "torch==$TORCH+cpu" || pip install --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH"
    else
        pip install "torch==$TORCH"
    fi
fi

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$VENV/bin/python" -c 'import torch; print("torch==" + torch.__version__)' > "$constraints"
echo "== installing anlit${extras:+ with $extras}"
pip install -c "$constraints" -e ".${extras:+[$extras]}"

# litdata, lightning and torchmetrics run without torchvision; one that does not fit the CPU build of torch breaks them.
if [ "$TORCH_BUILD" = cpu ]; then pip uninstall --quiet --yes torchvision; fi
"$VENV/bin/python" -c 'import anlit.command.lightning' || {
    echo "the installation in $VENV does not import: remove the folder $VENV and run the command again" >&2
    exit 1
}
