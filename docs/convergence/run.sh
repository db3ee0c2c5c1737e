#!/usr/bin/env bash
# The runs of this study, from the repository's root; what is finished is skipped, so it can be started again.
#
#   docs/convergence/run.sh CORPUS OPTIMIZER LR SEED [FLAGS...]      one run, CORPUS being python or english
#   docs/convergence/run.sh all                                      every run of the study, two at a time
set -euo pipefail

python=${PYTHON:-.venv/bin/python}

one() {
    local corpus=$1 optimizer=$2 lr=$3 seed=$4
    shift 4
    local data=data/stdlib out=runs/convergence/$corpus/optimizer=$optimizer,lr=$lr/seed=$seed
    [[ $corpus == english ]] && data=data/english
    [[ -e $out/summary.json ]] && return
    OMP_NUM_THREADS=1 "$python" -m megatron_muon.cli train --config configs/convergence.yaml --nproc 1 --quiet --out "$out" \
        --set "data_path=$data" --set "optimizer=$optimizer" --set "lr=$lr" --set "seed=$seed" "$@"
}

if [[ ${1:-} != all ]]; then
    one "$@"
    exit
fi
for corpus in python english; do
    for lr in 0.002 0.001 0.004; do echo "$corpus adam $lr 1"; done
    for lr in 0.008 0.004 0.016; do echo "$corpus muon $lr 1"; done
done | xargs -P 2 -L 1 "$0"
