#!/usr/bin/env bash
# Which scale mode lets a learning rate that was found on a narrow model hold on a wide one? 45 runs of a small GPT, two
# at a time, and a page with a picture and a table in runs/lr-transfer/report. Started again it goes on. Arguments
# go to every sweep: --dry-run, --seeds 3, --train-iters 400.
#
# With spectral the spectral norm of a step grows with the root of the longer side; with the other two it depends on the
# ratio of the sides alone. The extra factor of spectral makes its step on 128 x 128 as large as theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

corpus=${CORPUS:-data/stdlib} out=${OUT:-runs/lr-transfer}
modes=${MODES:-spectral unit_rms_norm shape_scaling} widths=${WIDTHS:-64 128 256} rates=${RATES:-0.0125,0.025,0.05,0.1,0.2}

[[ -e $corpus.bin ]] || megatron-muon data prepare --stdlib --output "$corpus"
grids=()
for width in $widths; do
    std=$(awk "BEGIN { printf \"%.4f\", 0.32 / sqrt($width) }") # of initial weights, 0.02 at 256
    grids+=(--grid "hidden_size=$width" "ffn_hidden_size=$((3 * width))" "num_attention_heads=$((width / 32))"
        "init_method_std=$std" "muon_lr=$rates")
done
for mode in $modes; do
    factor=1.0
    [[ $mode != spectral ]] || factor=0.0884 # one over the root of 128
    megatron-muon sweep --config configs/lr-transfer.yaml --nproc 1 --jobs 2 --out "$out/$mode" "${grids[@]}" \
        --set "data_path=$corpus" --set "muon_scale_mode=$mode" --set "muon_extra_scale_factor=$factor" "$@"
done
[[ " $* " == *" --dry-run "* ]] || python examples/lr_transfer.py "$out" --out "$out/report"
