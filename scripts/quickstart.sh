#!/usr/bin/env bash
# From a fresh clone to a trained GPT: set-up, then megatron-muon quickstart.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

help() {
    cat <<'TEXT'
Usage: scripts/quickstart.sh [FLAG...]

Makes .venv with the exact versions of requirements/lock.txt (once; a few minutes, 5 GB), and runs there

  megatron-muon quickstart --nproc 2 -- FLAG...

which trains a small GPT on the source of Python's standard library, with Muon under Megatron-FSDP. It needs no GPU, nothing
is downloaded but packages, and two free CPU cores do it in about three minutes; after ten steps it says how long this
machine needs. If runs/quickstart exists, it trains in runs/quickstart-TIME. FLAGs are those of
pretrain_gpt.py and win over what is chosen here. For example:

  scripts/quickstart.sh --train-iters 50            a shorter run
  scripts/quickstart.sh --exit-duration-in-mins 5   saves after five minutes, and shows the text
  scripts/quickstart.sh --muon-lr 0.01
  scripts/quickstart.sh --data-parallel-sharding-strategy optim

For an experiment file of your own, type megatron-muon train --config FILE.

Environment:
  NPROC             ranks (default 2; 4 need --micro-batch-size 2)
  OMP_NUM_THREADS   threads of each rank (default 1)
  PYTHON            the Python 3.12 or 3.13 to make .venv with (default: found)
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    help
    exit 0
fi

echo "quickstart: a small GPT learns with Muon on ${NPROC:-2} ranks, in about three minutes on free cores; Ctrl-C stops it"
scripts/lib/setup.sh
exec .venv/bin/megatron-muon quickstart --nproc "${NPROC:-2}" -- "$@" </dev/null
