#!/usr/bin/env bash
# The recipes of docs/recipes.md on a small GPT: each at three learning rates, every rate with three seeds, two runs at a
# time, and a page in runs/recipes/report. Started again it goes on. Arguments go to every sweep: --dry-run, --seeds 1,
# --train-iters 500.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

corpus=${CORPUS:-data/stdlib} out=${OUT:-runs/recipes}

[[ -e $corpus.bin ]] || megatron-muon data prepare --stdlib --output "$corpus"
for recipe in adamw:lr=0.001,0.002,0.004 muon:muon_lr=0.01,0.02,0.04 muonh:muon_lr=0.01,0.02,0.04 \
    moonlight:lr=0.004,0.008,0.016 cautious:lr=0.004,0.008,0.016 kimi-k2:lr=0.004,0.008,0.016; do
    megatron-muon sweep --config "configs/recipes/${recipe%%:*}.yaml" --nproc 1 --jobs 2 --seeds 3 \
        --out "$out/${recipe%%:*}" --grid "${recipe#*:}" \
        --set "data_path=$corpus" --set eval_interval=250 --set eval_iters=40 "$@"
done
[[ " $* " == *" --dry-run "* ]] || megatron-muon report "$out" --out "$out/report"
