#!/usr/bin/env bash
# A real Slurm cluster on this machine for the tests: slurmctld, several slurmd, munged, all on 127.0.0.1, no systemd.
# All state is below DIR. `start` also restarts dead daemons, and installs missing packages, as root on Debian.
#
#   tests/slurm.sh install       # only the packages
#   tests/slurm.sh start DIR     # prints the path of slurm.conf: export SLURM_CONF
#   tests/slurm.sh stop DIR      # cancels its jobs and ends its processes; DIR stays
#   tests/slurm.sh kill DIR NODE # loses a node without notice: slurmd, steps and their processes, by SIGKILL
#
#   NODES=4 CPUS=8 MEMORY=64000     resources that each node claims
#   PORT=17800                      the first of NODES + 4 ports
#   ACCOUNTING=1                    slurmdbd with its own MariaDB: sacct, and preemption by QOS
#   LIMITS=poll|cgroup              jobs are killed for their memory, by slurmstepd's own checks or by cgroups of v1
set -eu
usage="usage: tests/slurm.sh install, or start|stop|kill DIR [NODE]"
verb=${1:?$usage}
if [ "$verb" != install ]; then
    mkdir -p "${2:?$usage}"
    D=$(cd "$2" && pwd)
    cd "$D"
    export SLURM_CONF=$D/slurm.conf
fi
NODES=${NODES:-4} CPUS=${CPUS:-8} MEMORY=${MEMORY:-64000} PORT=${PORT:-17800} ACCOUNTING=${ACCOUNTING:-0}
LIMITS=${LIMITS:-none}
PATH=$PATH:/usr/sbin:/sbin
for name in $(compgen -v | grep -E '^(SLURM|SBATCH|SQUEUE|SACCT)_'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
done

alive() { [ -s "pid/$1" ] && grep -qsE 'munged|slurm|mariadbd' "/proc/$(cat "pid/$1")/cmdline"; }
await() {
    for _ in $(seq 200); do timeout 3 "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    echo "slurm.sh: gave up waiting for: $*" >&2
    tail -n 5 log/slurmctld >&2 || true
    return 1
}

install_packages() {
    local tools="slurmctld slurmd sbatch munged sshd" missing=""
    [ "$ACCOUNTING" = 0 ] || tools="$tools slurmdbd mariadbd"
    for tool in $tools; do command -v "$tool" >/dev/null || missing="$missing $tool"; done
    [ -n "$missing" ] || return 0
    echo "slurm.sh: installs$missing" >&2
    local packages="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge openssh-server"
    [ "$ACCOUNTING" = 0 ] || packages="$packages slurmdbd slurm-wlm-mysql-plugin mariadb-server"
    # Packages may start their own daemons, which this cluster does not use.
    local policy=/usr/sbin/policy-rc.d made=""
    [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; made=$policy; }
    apt-get -qq update >&2
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >&2
    [ -z "$made" ] || rm -f "$made"
}

configure() {
    local me host socket=$D/munge/socket storage=none
    me=$(id -un) host=$(hostname -s)
    mkdir -p munge state log pid spool tmp
    chmod 755 munge
    (umask 077; head -c 128 /dev/urandom >munge/key)
    [ "$ACCOUNTING" = 0 ] || storage=slurmdbd
    # A job's ports follow from its number, and clusters on one machine share ports: so each has its own numbers.
    # Slurm's own values are: SlurmdTimeout 300, KillWait 30, GraceTime 0, and cred_expire 120, for which a requeued job
    # waits. Without cgroups, linuxproc finds a job's processes by their parents.
    cat >slurm.conf.new <<CONF
ClusterName=ct
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/pid/slurmctld
SlurmdPidFile=$D/pid/slurmd-%n
SlurmctldLogFile=$D/log/slurmctld
SlurmdLogFile=$D/log/slurmd-%n
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/$([ "$LIMITS" = cgroup ] && echo cgroup || echo none)
JobAcctGatherType=jobacct_gather/$([ "$LIMITS" = poll ] && echo linux || echo none)
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
GresTypes=gpu
SlurmdTimeout=10
KillWait=5
MinJobAge=${MIN_JOB_AGE:-300}
FirstJobId=$((PORT % 1000 * 50 + 1))
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
JobRequeue=1
PriorityType=priority/multifactor
PreemptType=preempt/$([ "$ACCOUNTING" = 1 ] && echo qos || echo partition_prio)
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/$storage
NodeName=n[1-$NODES] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((PORT + 4))-$((PORT + 3 + NODES))] CPUs=$CPUS RealMemory=$MEMORY TmpDisk=2000000 Feature=bigmem Gres=gpu:h100:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 DefaultTime=10 MaxTime=7-0 PreemptMode=REQUEUE GraceTime=${GRACE_TIME:-30} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE PreemptMode=OFF State=UP
PartitionName=short Nodes=ALL PriorityTier=1 MaxTime=3 State=UP
CONF
    if [ "$ACCOUNTING" = 1 ]; then
        cat >>slurm.conf.new <<CONF
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 1))
AccountingStoragePass=$socket
AccountingStorageEnforce=qos,limits
AccountingStorageTRES=gres/gpu
CONF
        (umask 077; cat >slurmdbd.conf <<CONF
AuthType=auth/munge
AuthInfo=socket=$socket,cred_expire=5
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((PORT + 1))
SlurmUser=$me
PidFile=$D/pid/slurmdbd
LogFile=$D/log/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
        )
    fi
    [ "$LIMITS" != poll ] || printf 'JobAcctGather%s\n' Frequency=task=1 Params=OverMemoryKill >>slurm.conf.new
    [ "$LIMITS" != cgroup ] || printf 'Cgroup%s\n' Plugin=cgroup/v1 Mountpoint=/sys/fs/cgroup Automount=no >cgroup.conf
    [ "$LIMITS" != cgroup ] || echo ConstrainRAMSpace=yes >>cgroup.conf
    # Any character device stands for a GPU. Without a File, a node has none.
    echo "NodeName=n[1-$NODES] Name=gpu Type=h100 File=/dev/null,/dev/zero" >gres.conf
    mv slurm.conf.new slurm.conf
}

start_database() {
    export MYSQL_UNIX_PORT=$D/tmp/mysql.sock
    local me
    me=$(id -un)
    [ -d mysql/mysql ] || mariadb-install-db --no-defaults --user="$me" --datadir="$D/mysql" \
        --auth-root-authentication-method=normal --skip-test-db --skip-name-resolve >log/mariadb-install 2>&1
    alive mariadbd || { setsid mariadbd --no-defaults --user="$me" --datadir="$D/mysql" --socket="$MYSQL_UNIX_PORT" \
        --pid-file="$D/pid/mariadbd" --skip-networking --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        --log-error="$D/log/mariadbd" >/dev/null 2>&1 </dev/null & }
    await mariadb-admin --no-defaults -uroot -S "$MYSQL_UNIX_PORT" ping
    alive slurmdbd || slurmdbd
    await sacctmgr -n list cluster
    sacctmgr -n list cluster format=cluster | grep -qw ct || sacctmgr -i add cluster ct >/dev/null
    sacctmgr -n list qos format=name | grep -qw urgent && return
    sacctmgr -i add account lab cluster=ct >/dev/null
    sacctmgr -i add qos low,urgent >/dev/null
    sacctmgr -i modify qos urgent set preempt=low,normal >/dev/null
    sacctmgr -i modify qos low,normal set preemptmode=requeue gracetime=10 >/dev/null
    sacctmgr -i add user "$me" account=lab qos=normal,low,urgent defaultqos=normal >/dev/null
    sacctmgr -i modify user where name="$me" set defaultaccount=lab >/dev/null
}

start() {
    install_packages
    [ -f slurm.conf ] || configure
    NODES=$(sed -n 's/^NodeName=n\[1-\([0-9]*\)\].*/\1/p' slurm.conf) # as created
    alive munged || munged --force --key-file="$D/munge/key" --socket="$D/munge/socket" --pid-file="$D/pid/munged" \
        --log-file="$D/log/munged" --seed-file="$D/munge/seed"
    if grep -q slurmdbd slurm.conf; then start_database; fi
    alive slurmctld || slurmctld
    for n in $(seq "$NODES"); do
        mkdir -p "spool/n$n"
        alive "slurmd-n$n" || slurmd -N "n$n"
    done
    await bash -c "[ \$(sinfo -h -N -p low -t idle,mixed,allocated,draining,drained -o %N | grep -c .) -ge $NODES ]"
    echo "$D/slurm.conf"
}

stop() {
    [ -d pid ] || return 0
    if alive slurmctld; then
        timeout 10 scancel -u "$(id -un)" 2>/dev/null || true
        for _ in $(seq 100); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
    fi
    local names="" name pids=""
    for name in $(cd pid && ls | grep '^slurmd-n') slurmctld slurmdbd mariadbd munged; do
        alive "$name" || continue
        names="$names $name" pids="$pids $(cat "pid/$name")"
    done
    # shellcheck disable=SC2086
    [ -z "$pids" ] || kill $pids
    for _ in $(seq 40); do kill -0 $pids 2>/dev/null || break; sleep 0.1; done
    kill -9 $pids 2>/dev/null || true
    for name in $names; do rm -f "pid/$name"; done
    for _ in $(seq 20); do # until the last slurmstepd is gone
        [ -e cgroup.conf ] && compgen -G "/sys/fs/cgroup/*/slurm_n*" >/dev/null || break
        find /sys/fs/cgroup/*/slurm_n[0-9]* -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    done
}

kill_node() {
    kill -9 "$(cat "pid/slurmd-$1")"
    rm -f "pid/slurmd-$1"
    local environ pid parent
    for environ in /proc/[0-9]*/environ; do
        pid=${environ//[!0-9]/}
        { tr '\0' '\n' <"$environ" | grep -qx "SLURMD_NODENAME=$1" &&
            tr '\0' '\n' <"$environ" | grep -qx "SLURM_CONF=$D/slurm.conf"; } 2>/dev/null || continue
        parent=$(awk '$1 == "PPid:" {print $2}' "/proc/$pid/status" 2>/dev/null) || continue
        grep -qs '^slurmstepd' "/proc/$parent/cmdline" && kill -9 "$parent" 2>/dev/null
        kill -9 "$pid" 2>/dev/null || true
    done
}

case $verb in
    install) install_packages ;;
    start) start ;;
    stop) stop ;;
    kill) kill_node "${3:?$usage}" ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
