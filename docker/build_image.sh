#!/bin/sh
# Builds anlit's image with docker, podman or buildah, whichever is there, and tags it with the package's version.
# Usage: VARIANT=cuda|cpu sh docker/build_image.sh [--build-arg NAME=VALUE …]
#   ENGINE  docker, podman or buildah (default: the first that answers)
#   IMAGE   name without the tag, such as registry.example.org/me/anlit (default: anlit)
set -eu
cd "$(dirname "$0")/.."
VARIANT=${VARIANT:-cuda} IMAGE=${IMAGE:-anlit}

engine() {
    if docker info > /dev/null 2>&1; then echo docker
    elif podman info > /dev/null 2>&1; then echo podman
    elif buildah --version > /dev/null 2>&1; then echo buildah
    else
        echo "no engine answers: install podman or buildah, or start Docker's daemon" >&2
        return 2
    fi
}
ENGINE=${ENGINE:-$(engine)}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
commit=$(git rev-parse HEAD 2> /dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2> /dev/null)" ] || commit=$commit-dirty
tag=$version

case $VARIANT in
    cuda) ;;
    cpu)
        tag=$version-cpu
        set -- --build-arg BASE=docker.io/library/debian:12-slim \
            --build-arg DEVEL=docker.io/library/debian:12-slim \
            --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu \
            --build-arg FLASH_ATTN_VERSION= --build-arg FLASH_ATTN_4= --build-arg RUNTIME_PACKAGES= "$@"
        ;;
    *)
        echo "VARIANT=$VARIANT is not known: give cuda or cpu" >&2
        exit 2
        ;;
esac

echo "== building $IMAGE:$tag with $ENGINE"
"$ENGINE" build -f docker/Dockerfile -t "$IMAGE:$tag" --build-arg "VERSION=$version" --build-arg "COMMIT=$commit" "$@" .
