#!/usr/bin/env bash
# The recipes of docs/recipes.md on a small GPT, each at the rate that was best here, with three seeds, two runs at a time,
# and a page in runs/recipes/report. Started again it goes on. Arguments go to every sweep: --dry-run, --seeds 1. To look
# for a rate: RECIPES="muonh:muon_lr=0.04,0.08,0.16" ./examples/recipes.sh --seeds 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

corpus=${CORPUS:-data/stdlib} out=${OUT:-runs/recipes}
tuned="adamw:lr=0.002 muon:muon_lr=0.02 muonh:muon_lr=0.08 moonlight:lr=0.008 cautious:lr=0.008 kimi-k2:lr=0.008"
recipes=${RECIPES:-$tuned}

[[ -e $corpus.bin ]] || megatron-muon data prepare --stdlib --output "$corpus"
for recipe in $recipes; do
    megatron-muon sweep --config "configs/recipes/${recipe%%:*}.yaml" --nproc 1 --jobs 2 --seeds 3 \
        --out "$out/${recipe%%:*}" --grid "${recipe#*:}" \
        --set "data_path=$corpus" --set eval_interval=250 --set eval_iters=40 "$@"
done
[[ " $* " == *" --dry-run "* ]] || megatron-muon report "$out" --out "$out/report"
