# shellcheck shell=bash
# Sourced by the scripts: running a command in such a way that Ctrl-C, a closed terminal or `kill` of the script leaves
# no process behind, not even workers that torchrun put into sessions of their own.

# Prints the descendants of a process, one a line.
descendants() {
    local stat pid parent fields
    for stat in /proc/[0-9]*/stat; do
        { read -r fields <"$stat"; } 2>/dev/null || continue
        pid=${fields%% *}
        read -r _ parent _ <<<"${fields##*) }" # after the name, which may hold anything: state, parent, ...
        if [[ $parent == "$1" ]]; then
            printf '%s\n' "$pid"
            descendants "$pid"
        fi
    done
}

# Ends a process, which may end its descendants itself, then what is left of them; after 15 seconds by force.
end_tree() {
    local root=$1 pids pid left deadline=$((SECONDS + 15))
    mapfile -t pids < <(
        printf '%s\n' "$root"
        descendants "$root"
    )
    kill -TERM "$root" 2>/dev/null || true
    while ((SECONDS < deadline)); do
        left=0
        for pid in "${pids[@]}"; do
            ! kill -0 "$pid" 2>/dev/null || left=1
        done
        ((left)) || return 0
        kill -0 "$root" 2>/dev/null || kill -TERM "${pids[@]}" 2>/dev/null || true # it left some behind
        sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}

# Runs a command and returns its exit code. It does not read the terminal; a signal to this script ends it.
run() {
    local child code=0
    set -m # in a process group of its own: Ctrl-C reaches it once, through the trap
    "$@" </dev/null &
    child=$!
    set +m
    # shellcheck disable=SC2064 # the id of now is meant
    trap "trap '' INT TERM HUP; echo >&2; echo 'stopping ...' >&2; end_tree $child; exit 130" INT TERM HUP
    wait "$child" || code=$?
    trap - INT TERM HUP
    return "$code"
}
