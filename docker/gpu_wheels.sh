#!/bin/sh
# Collects what `make gpu` needs and a GPU machine without a network lacks: wheels for Python 3.12 on 64-bit x86 Linux,
# in $WHEELS. Such a machine usually has torch, triton, lightning, numpy, scipy, pyarrow, tokenizers, transformers, pytest.
# WITH="scipy pytest" collects these too. MORE=flash4 collects FlashAttention-4 with its compiler instead, into
# $WHEELS-flash4 (100 MB).
# Usage: PYTHON=python3 WHEELS=build/gpu-wheels WITH= MORE= sh docker/gpu_wheels.sh
set -eu
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-build/gpu-wheels} WITH=${WITH:-} MORE=${MORE:-}
cd "$(dirname "$0")/.."

platforms=
for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12; do platforms="$platforms --platform manylinux_${glibc}_x86_64"; done
platforms="$platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64"

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
    # jsonargparse and what it imports; what reads corpora; the hub's client; a peer; float8.
    collect "$WHEELS" "jsonargparse>=4.53,<4.54" docstring-parser typeshed-client importlib-resources zstandard \
        "httpx2>=2,<3" httpcore2 truststore litgpt==0.5.13 "torchao>=0.18" $WITH ;;
flash4)
    collect "$WHEELS-flash4" -r docker/flash-attn-4.txt einops protobuf ;;
*)
    echo "MORE=$MORE is not known: leave it out, or choose flash4" >&2; exit 2 ;;
esac
