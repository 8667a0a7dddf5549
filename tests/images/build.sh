#!/usr/bin/env bash
# Builds the images that the docker tests use; README.md says what each is for. No image is pulled, and nothing inside a
# container needs a network: Debian comes from mmdebstrap, Python packages from the pip of this machine.
#
#   tests/images/build.sh [--force] [NAME…]     # all without a NAME; only what is absent or out of date without --force
#   tests/images/build.sh --digest NAME         # of what it is made from
# shellcheck disable=SC2016 # the $1 in a hook is for mmdebstrap to give
set -euo pipefail

IMAGE=cloudtrain-test
NAMES=(torch pip lightning py313 python user nopython arm64)

# The local version keeps pip from ever choosing a CUDA build of several GB.
TORCH=torch==2.13.0+cpu
NUMPY=numpy==2.4.6
PIP=pip==26.3
# Without what the torch image has, and with nothing else that they ask for: aiohttp is for checkpoints at a URL.
LIGHTNING=(
    lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 packaging==26.3 PyYAML==6.0.3 tqdm==4.70.1
)
PACKAGES=/usr/local/lib/python3.11/dist-packages # on sys.path of bookworm's python3 without any variable set

# What an image was made from: see `digest`.
LABEL=cloudtrain-test.inputs

die() {
    echo "build.sh: $*" >&2
    exit 1
}

# digest NAME: of what the image is made from, which is its part of this file; a new image leaves the others as they are.
digest() {
    local made pin
    made=$(sed -n "/^\(build_$1\|packages\|debian\|on_torch\)() {/,/^}/p" "$0")
    for pin in TORCH NUMPY PIP LIGHTNING PACKAGES; do
        case $made in *"\$$pin"* | *"\${$pin"*) made+=$(sed -n "/^$pin=(/,/)/p; /^$pin=[^(]/p" "$0") ;; esac
    done
    [ "$1" = torch ] || [[ $(sed -n "/^build_$1() {/,/^}/p" "$0") != *on_torch* ]] || made+=$(digest torch)
    sha256sum <<<"$made" | cut -d ' ' -f 1
}

# silently WHAT COMMAND…: shows nothing, and on failure the one line of the output that names the cause. In the
# background, as bash handles a signal during `wait` at once.
silently() {
    local what=$1 failed=
    shift
    "$@" >"$tmp/log" 2>&1 &
    child=$!
    wait "$child" || failed=yes
    child=
    [ -z "$failed" ] || die "$what: $(grep -E -m 1 '^(E|ERROR|Error)\b' "$tmp/log" || tail -n 1 "$tmp/log")"
}

# Also after a signal; waits, as mmdebstrap then removes a tree of its own.
cleanup() {
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null || true
    rm -rf "$tmp"
}

# packages FOLDER REQUIREMENT…: for the image's Python, whichever runs pip. Nothing is compiled here: another Python's
# .pyc would be of no use.
packages() {
    local folder=$1
    shift
    silently "pip install $*" env TMPDIR="$tmp" "$python" -m pip install --target "$folder" --no-compile \
        --python-version 3.11 --only-binary :all: "$@"
    rm -rf "${folder:?}/bin" "$folder/share" # scripts that name this machine's interpreter, and man pages
}

# debian NAME MMDEBSTRAP-ARGUMENT…: the image NAME, of a tree that mmdebstrap makes.
debian() {
    local name=$1
    shift
    silently "mmdebstrap for $name" mmdebstrap --format tar \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt=force-unsafe-io \
        "$@" "$tmp/$name.tar"
    silently "docker import of $name" docker import --change "LABEL $LABEL=$inputs" "$tmp/$name.tar" "$IMAGE:$name"
    rm "$tmp/$name.tar"
}

# on_torch NAME CONTEXT: the image NAME, on the torch image, of what the Dockerfile on stdin adds.
on_torch() {
    ensure torch
    cat >"$2/Dockerfile"
    silently "docker build of $1" docker build --no-cache --force-rm --network none \
        --label "$LABEL=$inputs" --tag "$IMAGE:$1" "$2"
}

# Its packages go into Debian's own tree, so that 800 MB are not copied through a build context. The import writes the
# .pyc of the modules that it loads (env -i, as PYTHONDONTWRITEBYTECODE may be set here), all that the entry points use:
# without them each rank in a container compiles 630 modules at its start, which takes 4 s more.
build_torch() {
    packages "$tmp/torch" "$TORCH" "$NUMPY"
    if compgen -G "$tmp/torch/nvidia*" >"$tmp/log"; then
        die "$TORCH brought CUDA packages: $(xargs -n 1 basename <"$tmp/log" | xargs)"
    fi
    debian torch --variant minbase --include python3,ca-certificates \
        --customize-hook="sync-in '$tmp/torch' $PACKAGES" \
        --customize-hook='chroot "$1" env -i PATH=/usr/bin:/bin python3 -c "import numpy, torch.distributed.run, \
            torch.distributed.checkpoint.staging, torch.distributed.fsdp, torch.utils.data"' \
        bookworm
    rm -rf "$tmp/torch"
}

build_pip() {
    mkdir "$tmp/pip"
    packages "$tmp/pip/packages" "$PIP"
    on_torch pip "$tmp/pip" <<-END
		FROM $IMAGE:torch
		COPY packages $PACKAGES
	END
}

build_lightning() {
    mkdir "$tmp/lightning"
    packages "$tmp/lightning/packages" --no-deps "${LIGHTNING[@]}"
    on_torch lightning "$tmp/lightning" <<-END
		FROM $IMAGE:torch
		COPY packages $PACKAGES
		RUN env -i PATH=/usr/bin:/bin python3 -c "import lightning.pytorch.strategies"
	END
}

build_py313() {
    debian py313 --variant minbase --include python3 trixie
}

build_python() {
    mkdir "$tmp/python"
    on_torch python "$tmp/python" <<-END
		FROM $IMAGE:torch
		RUN mv /usr/bin/python3.11 /usr/bin/python && rm /usr/bin/python3
	END
}

build_user() {
    mkdir "$tmp/user"
    on_torch user "$tmp/user" <<-END
		FROM $IMAGE:torch
		USER 4242
	END
}

build_nopython() {
    debian nopython --variant extract --include busybox-static \
        --extract-hook='chroot "$1" /bin/busybox --install -s /bin' \
        bookworm
}

# An archive for docker load, made by hand: older engines write their own architecture into what they import or build,
# whatever --platform says.
build_arm64() {
    local other=arm64
    [ "$arch" != arm64 ] || other=amd64
    mkdir "$tmp/arm64"
    tar -c -f "$tmp/arm64/layer.tar" -T /dev/null
    cat >"$tmp/arm64/config.json" <<-END
		{
		  "architecture": "$other", "os": "linux", "created": "$(date -u +%FT%TZ)",
		  "config": {"Cmd": ["/bin/sh"], "Labels": {"$LABEL": "$inputs"}},
		  "rootfs": {"type": "layers", "diff_ids": ["sha256:$(sha256sum <"$tmp/arm64/layer.tar" | cut -d ' ' -f 1)"]}
		}
	END
    cat >"$tmp/arm64/manifest.json" <<-END
		[{"Config": "config.json", "RepoTags": ["$IMAGE:arm64"], "Layers": ["layer.tar"]}]
	END
    tar -c -f "$tmp/arm64.tar" -C "$tmp/arm64" manifest.json config.json layer.tar
    silently "docker load of arm64" docker load --input "$tmp/arm64.tar"
}

# Builds the image NAME unless it is up to date, or was built by this very run.
done=()
ensure() {
    local name=$1 began=$SECONDS found inputs
    inputs=$(digest "$name")
    [[ " ${done[*]} " != *" $name "* ]] || return 0
    found=$(docker image inspect --format "{{index .Config.Labels \"$LABEL\"}}" "$IMAGE:$name" 2>/dev/null) || found=
    if [ "$found" != "$inputs" ] || [[ " ${forced[*]} " == *" $name "* ]]; then
        can_build
        "build_$name"
        echo "$IMAGE:$name built ($((SECONDS - began)) s)"
    else
        echo "$IMAGE:$name already there"
    fi
    done+=("$name")
}

# What building takes, asked for only once there is something to build.
python=
can_build() {
    [ -z "$python" ] || return 0
    local venv
    venv=$(dirname "$0")/../../.venv/bin/python
    command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: install Debian's package of that name"
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
    elif "$venv" -m pip --version >/dev/null 2>&1; then
        python=$venv
    else
        python=python3
    fi
    "$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip: set PYTHON to a Python that has"
}

if [ "${1:-}" = --digest ]; then
    [[ " ${NAMES[*]} " == *" ${2:-} "* ]] || die "no image ${2:-}; there are: ${NAMES[*]}"
    digest "$2"
    exit
fi

names=() forced=() force=
for argument; do
    if [ "$argument" = --force ]; then
        force=yes
    elif [[ " ${NAMES[*]} " == *" $argument "* ]]; then
        names+=("$argument")
    else
        die "no image $argument; there are: ${NAMES[*]}"
    fi
done
[ ${#names[@]} -gt 0 ] || names=("${NAMES[@]}")
[ -z "$force" ] || forced=("${names[@]}")

command -v docker >/dev/null || die "docker is missing: install it and start its daemon"
arch=$(docker version --format '{{.Server.Arch}}' 2>/dev/null) || die "docker does not answer: start its daemon"

# One build at a time. What a killed build still runs holds the lock too, until it ends.
exec 9>"${TMPDIR:-/tmp}/cloudtrain-test-images.lock"
flock 9

child=
tmp=$(mktemp -d)
trap cleanup EXIT
chmod 755 "$tmp" # mmdebstrap reads from it with fewer rights in some modes

for name in "${names[@]}"; do
    ensure "$name"
done

# Those that lost their tag to a newer build.
[ -z "$python" ] || docker image prune --force --filter "label=$LABEL" >/dev/null
