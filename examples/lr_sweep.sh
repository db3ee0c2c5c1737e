#!/usr/bin/env bash
# Learning rates and seeds of several optimizers, one training after the other, and a table and a picture of them. Started
# again it continues. Arguments go to every training: --train-iters 500, --no-save, --dry-run.
#
#   SEEDS="1 2 3" RATES="adam:1e-3 adam:2e-3 muon:4e-3 muon:8e-3" CONFIG=configs/quickstart.yaml NPROC=2 ./examples/lr_sweep.sh
#
# The first rate is the baseline. On a cluster: scripts/slurm/sweep.sbatch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/train_once.sh"

out=${OUT:-runs/lr-sweep}
for seed in ${SEEDS:-1}; do
    for point in ${RATES:-adam:1e-3 adam:2e-3 muon:4e-3 muon:8e-3}; do
        optimizer=${point%%:*} lr=${point#*:}
        train_once "$out/$optimizer-$lr-$seed" --config "${CONFIG:-configs/quickstart.yaml}" --nproc "${NPROC:-1}" \
            --optimizer "$optimizer" --lr "$lr" --seed "$seed" "$@"
    done
done
compare_finished "$out/losses.png"
