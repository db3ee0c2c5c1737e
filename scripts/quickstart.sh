#!/usr/bin/env bash
# From a fresh clone to a trained GPT: set-up, data, training with Muon under Megatron-FSDP, summary.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

help() {
    cat <<'TEXT'
Usage: scripts/quickstart.sh [FLAG...]

Trains a small GPT on the source of Python's standard library, with Muon under Megatron-FSDP, on two ranks.
It needs no GPU, nothing is downloaded but packages, and two CPU cores do it in about three minutes:

  1. .venv with the exact versions of requirements/lock.txt            (once; a few minutes, 5 GB)
  2. data/stdlib.bin and .idx, made from the standard library          (once; seconds)
  3. megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/quickstart [-- FLAG...]
  4. megatron-muon summary runs/quickstart

Where runs/quickstart holds a run, the next one goes to runs/quickstart-2, and so on: none is written over.
FLAGs are those of pretrain_gpt.py and win over what is chosen here. For example:

  scripts/quickstart.sh --muon-lr 0.01
  scripts/quickstart.sh --data-parallel-sharding-strategy optim

For an experiment file of your own, type megatron-muon train --config FILE.

Environment:
  NPROC             ranks (default 2)
  OMP_NUM_THREADS   threads of each rank (default 1)
  PYTHON            the Python 3.12 or 3.13 to make .venv with (default: found)
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    help
    exit 0
fi

echo "quickstart: a small GPT learns with Muon on ${NPROC:-2} ranks, in about three minutes; Ctrl-C stops it"
scripts/lib/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Hands a signal on to a command, which ends its own processes, and waits for its end.
stop() {
    trap '' INT TERM HUP
    printf '\nstopping ...\n' >&2
    kill -TERM "$1" 2>/dev/null || true
    wait "$1" || true
    exit 130
}

# Runs a command and returns its exit code. It does not read the terminal; a signal to this script ends it.
run() {
    local child code=0
    "$@" </dev/null &
    child=$!
    # shellcheck disable=SC2064 # the id of now is meant
    trap "stop $child" INT TERM HUP
    wait "$child" || code=$?
    trap - INT TERM HUP
    return "$code"
}

# The manifest is written last.
if [[ ! -f data/stdlib.prepared.json || ! -s data/stdlib.bin || ! -s data/stdlib.idx ]]; then
    run .venv/bin/megatron-muon data prepare --stdlib --output data/stdlib
fi

echo
out=runs/quickstart
for ((number = 2; ; number++)); do
    [[ -e $out/tensorboard ]] || break # nothing there, or a start that came to nothing
    out=runs/quickstart-$number
done

run .venv/bin/megatron-muon train --config configs/quickstart.yaml --nproc "${NPROC:-2}" --out "$out" -- "$@"

echo
.venv/bin/megatron-muon summary "$out"
