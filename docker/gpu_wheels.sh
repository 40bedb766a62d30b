#!/bin/sh
# Collects what `make gpu` needs beside torch, triton, lightning and torchmetrics, for a GPU machine without a network:
# wheels for Python 3.12 on 64-bit x86 Linux, in $WHEELS, at most 60 MB.
# MORE=flash4 collects FlashAttention-4 with its compiler instead, into $WHEELS-flash4 (more than 60 MB), MORE=float8
# torchao. WITHOUT="scipy transformers" leaves out what the machine has.
# Usage: PYTHON=python3 WHEELS=build/gpu-wheels MORE= WITHOUT= sh docker/gpu_wheels.sh
set -eu
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-build/gpu-wheels} MORE=${MORE:-} WITHOUT=${WITHOUT:-}
cd "$(dirname "$0")/.."

platforms=
for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12; do platforms="$platforms --platform manylinux_${glibc}_x86_64"; done
platforms="$platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64"

needed="jsonargparse>=4.53 docstring-parser typeshed-client importlib-resources scipy>=1.15
    tokenizers>=0.22 safetensors>=0.5 huggingface_hub>=2.4 httpx2>=2,<3 httpcore2 h11 anyio truststore idna
    rich>=14 markdown-it-py>=4 mdurl pygments filelock>=3.16
    pytest>=8 pluggy iniconfig pytest-xdist>=3.6 execnet
    nvidia-ml-py transformers>=5.0 regex litgpt==0.5.13 psutil"
# The program; its tests; the GPU's clocks; the peers whose steps are timed beside ours.

collect() {  # each package by name, without what it needs: torch must stay what the machine has
    folder=$1; shift
    rm -rf "$folder"; mkdir -p "$folder"
    "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp $platforms --dest "$folder" "$@"
    bytes=$(cat "$folder"/*.whl | wc -c)
    echo "$folder: $(ls "$folder" | wc -l) wheels, $((bytes / 1000000)) MB"
}

case $MORE in
"")
    for package in $WITHOUT; do
        needed=$(printf '%s\n' $needed | grep -v "^$package\([<>=].*\)\?$")
    done
    collect "$WHEELS" $needed
    [ "$bytes" -le 60000000 ] || { echo "more than 60 MB: take a package out of docker/gpu_wheels.sh" >&2; exit 1; } ;;
float8)
    collect "$WHEELS-float8" "torchao>=0.18" ;;
flash4)
    collect "$WHEELS-flash4" -r docker/flash-attn-4.txt einops protobuf ;;
*)
    echo "MORE=$MORE is not known: leave it out, or choose flash4 or float8" >&2; exit 2 ;;
esac
