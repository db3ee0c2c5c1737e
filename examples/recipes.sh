#!/usr/bin/env bash
# The recipes of docs/recipes.md on a small GPT, each at the rate that was best here, with three seeds, and a table and a picture
# in runs/recipes. Started again it continues. Arguments go to every training: --dry-run. To search for a rate:
#
#   RECIPES="muonh:muon-lr=0.04,0.08,0.16" SEEDS=1 ./examples/recipes.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/train_once.sh

corpus=${CORPUS:-data/stdlib} out=${OUT:-runs/recipes}
tuned="adamw:lr=0.002 muon:muon-lr=0.02 muonh:muon-lr=0.08 moonlight:lr=0.008 cautious:lr=0.008 kimi-k2:lr=0.008"
[[ -e $corpus.bin ]] || megatron-muon data prepare --stdlib --output "$corpus"
for seed in ${SEEDS:-1 2 3}; do
    for recipe in ${RECIPES:-$tuned}; do
        IFS=:= read -r name flag rates <<<"$recipe"
        for rate in ${rates//,/ }; do
            train_once "$out/$name-$rate-$seed" --config "configs/recipes/$name.yaml" --nproc 1 --no-save --seed "$seed" \
                "--${flag//_/-}" "$rate" --data-path "$corpus" --eval-interval 250 --eval-iters 40 "$@"
        done
    done
done
compare_finished "$out/losses.png"
