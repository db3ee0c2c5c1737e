#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine's loopback, to try scripts/slurm/pretrain.sbatch before paying for it.
set -euo pipefail

help() {
    cat <<'TEXT'
Usage: scripts/slurm/local_cluster.sh start | stop | status

  start    install Debian's slurm-wlm and munge where they are missing (apt-get), then start munged, slurmctld and
           two node daemons; ends when both nodes are idle
  status   what sinfo and squeue say
  stop     cancel the jobs, end the daemons, remove their folder; the packages stay installed

It needs root, Debian or Ubuntu, and the addresses 127.0.0.1 and 127.0.0.2. No systemd, no accounting, no cgroups, and
nothing is written outside its own folder. Afterwards:

  export SLURM_CONF=/tmp/megatron-muon-slurm/slurm.conf
  sinfo

The nodes are called by their addresses, so that their names resolve. Each claims four processors, whatever the machine
has: jobs share what there is. Partitions: 'main', the default, and 'urgent', whose jobs preempt those of 'main', which
get SIGTERM, GRACE_SECONDS to write a checkpoint, and are requeued.

Environment:
  CLUSTER_DIR      folder of the cluster (default /tmp/megatron-muon-slurm); a second cluster beside it needs BASE_PORT
  BASE_PORT        first of three ports (default 26817)
  GRACE_SECONDS    from a preemption's SIGTERM to its SIGKILL (default 120)
TEXT
}

say() { printf 'local_cluster.sh: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

DIR=${CLUSTER_DIR:-/tmp/megatron-muon-slurm}
BASE_PORT=${BASE_PORT:-26817}
GRACE_SECONDS=${GRACE_SECONDS:-120}
NODES=(127.0.0.1 127.0.0.2)
PROGRAMS=(munged slurmctld slurmd sbatch)
export SLURM_CONF=$DIR/slurm.conf

installed() {
    local program
    for program in "${PROGRAMS[@]}"; do
        command -v "$program" >/dev/null || return 1
    done
}

# apt-get would start the services as soon as they are unpacked; policy-rc.d is Debian's way to say no.
install_packages() {
    local policy=/usr/sbin/policy-rc.d ours="" log
    command -v apt-get >/dev/null ||
        die "SLURM is not installed, and without apt-get it cannot be: install slurmctld, slurmd, sbatch and munged"
    say "installing slurm-wlm and munge"
    if [[ ! -e $policy ]]; then
        ours=$policy
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    log=$(mktemp)
    if ! apt_get_install >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f ${ours:+"$ours"} "$log"
        die "apt-get could not install slurm-wlm and munge: see above"
    fi
    rm -f ${ours:+"$ours"} "$log"
}

apt_get_install() {
    local install=(apt-get install -y --no-install-recommends slurm-wlm munge)
    export DEBIAN_FRONTEND=noninteractive
    "${install[@]}" || { apt-get update && "${install[@]}"; }
}

write_config() {
    local node port=$BASE_PORT
    cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$BASE_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again: 120 s by default, 5 at least
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool.%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
KillWait=10
PropagateResourceLimits=NONE
CONF
    for node in "${NODES[@]}"; do
        printf 'NodeName=%s NodeHostname=localhost NodeAddr=%s Port=%d CPUs=4 RealMemory=1000 State=UNKNOWN\n' \
            "$node" "$node" $((++port)) >>"$SLURM_CONF"
    done
    cat >>"$SLURM_CONF" <<CONF
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=$GRACE_SECONDS
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
}

# The daemons go into the background by themselves, once they have found nothing to complain about.
start() {
    local node deadline
    [[ ! -e $DIR ]] || die "$DIR is there already: type '$0 status', or '$0 stop' first"
    [[ $EUID == 0 ]] || die "needs root, to install packages and to run SLURM's daemons: type 'sudo $0 start'"
    installed || install_packages
    mkdir -m 755 "$DIR" "$DIR/state"
    trap 'tail -q -n 5 "$DIR"/*.log >&2; stop' EXIT # where one of these fails
    write_config
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/munge.key")
    munged --force --key-file="$DIR/munge.key" --socket="$DIR/munge.socket" --pid-file="$DIR/munged.pid" \
        --log-file="$DIR/munged.log" --seed-file="$DIR/munged.seed"
    slurmctld
    for node in "${NODES[@]}"; do
        mkdir "$DIR/spool.$node"
        slurmd -N "$node"
    done
    deadline=$((SECONDS + 30))
    until [[ $(sinfo --noheader --partition main --format '%D %T' 2>/dev/null) == "${#NODES[@]} idle" ]]; do
        ((SECONDS < deadline)) || die "the nodes are not idle after 30 seconds; the end of the logs:"
        sleep 0.2
    done
    trap - EXIT
    say "two nodes are idle; type: export SLURM_CONF=$SLURM_CONF"
}

running() { [[ -f $DIR/slurm.conf ]]; }

status() {
    running || die "no cluster in $DIR: type '$0 start'"
    sinfo
    squeue
}

stop() {
    local file pid pids=() deadline=$((SECONDS + 60))
    if ! running; then
        rm -rf "$DIR"
        say "no cluster in $DIR"
        return
    fi
    while [[ -n $(squeue --noheader 2>/dev/null) ]]; do # until their processes have ended
        ((SECONDS < deadline)) || die "jobs do not end: type '$0 status', then '$0 stop' again"
        # Again and again: a job that is on its way back into the queue cannot be cancelled until it is there.
        squeue --noheader --array --format %i 2>/dev/null | xargs --no-run-if-empty scancel --quiet || true
        sleep 0.5
    done
    deadline=$((SECONDS + 15))
    for file in "$DIR"/slurmd.*.pid "$DIR/slurmctld.pid" "$DIR/munged.pid"; do # munged last: it vouches for the others
        [[ -f $file ]] || continue
        pid=$(<"$file")
        pids+=("$pid")
        kill -TERM "$pid" 2>/dev/null || true
    done
    for pid in "${pids[@]}"; do
        while ((SECONDS < deadline)) && kill -0 "$pid" 2>/dev/null; do
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$DIR"
    say "stopped"
}

case ${1:-} in
    start | status | stop) "$1" ;;
    -h | --help) help ;;
    *)
        help >&2
        exit 2
        ;;
esac
