#!/usr/bin/env bash
# A real kube-apiserver 1.20.2 with etcd for the tests, built from Debian bookworm's source package. Nothing is installed.
#
#   tests/kubernetes_api.sh build     # once: 6 minutes of two idle cores, 120 MB of downloads, 2 GB while it builds
#   tests/kubernetes_api.sh start DIR # builds if needed, and prints the path of a kubeconfig; state and logs in DIR
#   tests/kubernetes_api.sh stop DIR  # DIR stays
#
#   CLOUDTRAIN_KUBERNETES_API=FOLDER  # folder of the two programs, 132 MB; default ~/.cache/cloudtrain-kubernetes-api
#   PORT=16443                        # the first of three ports on the loopback
#
# 1.20 is the newest version whose source in Debian has the server. It silently drops unknown fields.
set -euo pipefail
usage="usage: tests/kubernetes_api.sh build, or start|stop DIR"
verb=${1:?$usage}
bin=${CLOUDTRAIN_KUBERNETES_API:-$HOME/.cache/cloudtrain-kubernetes-api}
PORT=${PORT:-16443}

debian() { # a separate apt for bookworm alone, independent of this machine's sources
    local state=$1/apt mirror
    mkdir -p "$state"/{lists/partial,cache/archives/partial,state,etc}
    touch "$state/state/status"
    mirror=$(apt-cache policy | grep -oE 'https?://[^ ]+/debian ' | head -n 1)
    for kind in deb deb-src; do
        echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
    done >"$state/etc/sources.list"
    cat >"$state/apt.conf" <<APT
Dir::State "$state/state"; Dir::State::lists "$state/lists"; Dir::State::status "$state/state/status";
Dir::Cache "$state/cache"; Dir::Etc::sourcelist "$state/etc/sources.list"; Dir::Etc::sourceparts "-"; APT::Sandbox::User "root";
APT
    export APT_CONFIG=$state/apt.conf
    apt-get update -qq
}

build() {
    local work=$bin.build
    rm -rf "$work"
    mkdir -p "$work"/{debs,root,source,tools} "$bin"
    debian "$work"
    (cd "$work/debs" && apt-get download -qq golang-1.19-go golang-1.19-src etcd-server golang-github-modern-go-reflect2-dev)
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
    (cd "$work/source" && apt-get source -qq --download-only kubernetes && tar xzf kubernetes_*.orig.tar.gz)
    cd "$work"/source/kubernetes-*/
    # The reflect2 of 2020 misreads the types of maps since Go 1.18, which crashes the server. Debian's own is 1.0.2.
    rm -f vendor/github.com/modern-go/reflect2/*.{go,s}
    install -m 644 "$work"/root/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} vendor/github.com/modern-go/reflect2/
    # Its Makefile copies single programs by rsync, which few machines have.
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nshift\nexec cp -p "$@"\n' >"$work/tools/rsync"
    chmod 755 "$work/tools/rsync"
    mkdir -p .go/src/k8s.io
    ln -sfn ../../.. .go/src/k8s.io/kubernetes # as in debian/rules for kubectl
    export HOME=$work GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$PWD/.go GOCACHE=$work/gocache GOPROXY=off CGO_ENABLED=0
    PATH=$GOROOT/bin:$PATH:$work/tools
    make WHAT=cmd/kube-apiserver >"$bin/build.log" 2>&1 || { tail -n 5 "$bin/build.log" >&2; exit 1; }
    install "$work/root/usr/bin/etcd" "$bin/"
    install _output/bin/kube-apiserver "$bin/"
    chmod -R u+w "$work"
    rm -rf "$work"
}

start() {
    local a=http://127.0.0.1:$((PORT + 1)) b=http://127.0.0.1:$((PORT + 2)) pki=$D/pki
    [ -x "$bin/kube-apiserver" ] || (build)
    mkdir -p "$pki"
    rm -rf "$D/etcd"
    [ -f "$pki/sa.key" ] || openssl genrsa -out "$pki/sa.key" 2048 2>/dev/null
    echo 'admin,admin,admin,"system:masters"' >"$D/tokens.csv"
    "$bin/etcd" --data-dir "$D/etcd" --listen-client-urls "$a" --advertise-client-urls "$a" --listen-peer-urls "$b" \
        --initial-advertise-peer-urls "$b" --initial-cluster "default=$b" --unsafe-no-fsync >"$D/etcd.log" 2>&1 &
    echo $! >"$D/etcd.pid"
    "$bin/kube-apiserver" --etcd-servers "$a" --bind-address 127.0.0.1 --advertise-address 127.0.0.1 --secure-port "$PORT" \
        --cert-dir "$pki" --service-account-issuer https://kubernetes --service-account-key-file "$pki/sa.key" \
        --service-account-signing-key-file "$pki/sa.key" --service-cluster-ip-range 10.96.0.0/16 \
        --authorization-mode RBAC --token-auth-file "$D/tokens.csv" --disable-admission-plugins ServiceAccount \
        --endpoint-reconciler-type none >"$D/api.log" 2>&1 &
    echo $! >"$D/api.pid"
    for _ in $(seq 240); do
        curl -sk -m 2 -H 'Authorization: Bearer admin' "https://127.0.0.1:$PORT/readyz" | grep -qx ok && break
        kill -0 "$(cat "$D/api.pid")" || { tail -n 3 "$D/api.log" >&2; exit 1; }
        sleep 0.5
    done
    cat >"$D/kubeconfig" <<CONFIG
{"apiVersion": "v1", "kind": "Config", "current-context": "oracle",
 "clusters": [{"name": "oracle", "cluster": {"server": "https://127.0.0.1:$PORT", "certificate-authority": "$pki/apiserver.crt"}}],
 "users": [{"name": "admin", "user": {"token": "admin"}}],
 "contexts": [{"name": "oracle", "context": {"cluster": "oracle", "user": "admin", "namespace": "default"}}]}
CONFIG
    echo "$D/kubeconfig"
}

if [ "$verb" != build ]; then
    mkdir -p "${2:?$usage}"
    D=$(cd "$2" && pwd)
fi
case $verb in
build) build ;;
start) start ;;
stop) for name in api etcd; do kill "$(cat "$D/$name.pid")" 2>/dev/null || true; done ;;
*) echo "$usage" >&2; exit 2 ;;
esac
