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
  3. torchrun --nproc-per-node 2 pretrain_gpt.py --optimizer muon --use-megatron-fsdp [FLAG...]
  4. megatron-muon summary runs/quickstart

FLAGs are those of pretrain_gpt.py and come last, so they win over what is chosen here. The summary reads
runs/quickstart, so leave --tensorboard-dir as it is. For example:

  scripts/quickstart.sh --muon-lr 0.01
  scripts/quickstart.sh --data-parallel-sharding-strategy optim

A model flag or --config takes the place of configs/quickstart.yaml: then call torchrun yourself.

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

scripts/lib/setup.sh
# shellcheck source=scripts/lib/run.sh
source scripts/lib/run.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The manifest is written last.
if [[ ! -f data/stdlib.prepared.json || ! -s data/stdlib.bin || ! -s data/stdlib.idx ]]; then
    run .venv/bin/megatron-muon data prepare --stdlib --output data/stdlib
fi

run .venv/bin/torchrun --nproc-per-node "${NPROC:-2}" \
    pretrain_gpt.py --optimizer muon --use-megatron-fsdp "$@"

.venv/bin/megatron-muon summary runs/quickstart
