#!/usr/bin/env bash
# Which scale mode lets a learning rate that was found on a narrow model hold on a wide one? 45 runs of a small GPT, and a table
# for each scale mode. Started again it continues. Arguments go to every training: --train-iters 400, --dry-run.
#
# With spectral the spectral norm of a step grows with the root of the longer side; with the other two it depends on the
# ratio of the sides alone. The extra factor of spectral makes its step on 128 x 128 as large as theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/train_once.sh

corpus=${CORPUS:-data/stdlib} out=${OUT:-runs/lr-transfer}
[[ -e $corpus.bin ]] || megatron-muon data prepare --stdlib --output "$corpus"
for mode in ${MODES:-spectral unit_rms_norm shape_scaling}; do
    factor=1.0
    [[ $mode != spectral ]] || factor=0.0884 # one over the root of 128
    finished=()
    for width in ${WIDTHS:-64 128 256}; do
        std=$(awk "BEGIN { printf \"%.4f\", 0.32 / sqrt($width) }") # of initial weights, 0.02 at 256
        for rate in ${RATES:-0.0125 0.025 0.05 0.1 0.2}; do
            train_once "$out/$mode-$width-$rate" --config configs/lr-transfer.yaml --nproc 1 --no-save \
                --data-path "$corpus" --muon-scale-mode "$mode" --muon-extra-scale-factor "$factor" \
                --hidden-size "$width" --ffn-hidden-size $((3 * width)) --num-attention-heads $((width / 32)) \
                --init-method-std "$std" --muon-lr "$rate" "$@"
        done
    done
    compare_finished "$out/$mode.png"
done
