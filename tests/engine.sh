#!/usr/bin/env sh
# A container engine for the tests, on Debian and as root: installed if absent, started if none answers.
#
#   tests/engine.sh start PIDFILE     # writes the pid of a started engine to PIDFILE
#   tests/engine.sh stop PIDFILE
set -eu
pidfile=$2

if [ "$1" = stop ]; then
    [ ! -s "$pidfile" ] || kill "$(cat "$pidfile")"
    exit 0
fi

: >"$pidfile"
for tool in dockerd docker-compose fusermount3 mmdebstrap unshare; do
    command -v "$tool" >/dev/null || missing="${missing:-} $tool"
done
if [ -n "${missing:-}" ]; then
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y docker.io docker-compose fuse3 iptables mmdebstrap util-linux
fi
if ! docker version >/dev/null 2>&1; then
    nohup dockerd >"$pidfile.log" 2>&1 &
    echo $! >"$pidfile"
    tries=0
    until docker version >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ "$tries" -lt 120 ] || { tail -n 5 "$pidfile.log" >&2; echo "engine.sh: dockerd does not answer" >&2; exit 1; }
        sleep 0.5
    done
fi
