# For the sweeps of this folder: `source` it.

finished=() # folders of runs for `megatron-muon compare`

# train_once FOLDER ARGUMENT...: `megatron-muon train` with the arguments, unless FOLDER holds a run that has finished or diverged;
# one that was interrupted continues from its checkpoint, or starts over if it has none.
train_once() {
    local folder=$1 status=0
    shift
    if ! grep -qsE '"outcome": "finished"|"diverged": true' "$folder/summary.json"; then
        megatron-muon train --resume --out "$folder" "$@" || status=$?
    fi
    if grep -qs '"outcome": "finished"' "$folder/summary.json"; then
        finished+=("$folder")
    elif ! grep -qs '"diverged": true' "$folder/summary.json"; then
        ((status == 0)) || exit "$status" # Ctrl-C too; a dry run goes on
    fi
}

# compare_finished: the table of all runs that have finished, and a picture.
compare_finished() {
    ((${#finished[@]} < 2)) || megatron-muon compare "${finished[@]}" --png "$1"
}
