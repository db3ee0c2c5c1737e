#!/usr/bin/env bash
# Set-up and every check of the project; all parts run, and the exit code says whether one failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

help() {
    cat <<'TEXT'
Usage: scripts/test.sh [PART...] [-- PYTEST_ARGUMENT...]

PARTs (default: all of them, in this order):
  lint         ruff check, ruff format --check, mypy
  unit         tests/unit: no ranks
  functional   tests/functional: real ranks over gloo, the real command line; minutes

For example:
  scripts/test.sh unit
  scripts/test.sh functional -- -k reference -x
  scripts/test.sh functional -- -m ''      every layout and case, not only those of the usual run
TEXT
}

parts=()
while (($#)); do
    case $1 in
        -h | --help)
            help
            exit 0
            ;;
        lint | unit | functional) parts+=("$1") ;;
        --)
            shift
            break
            ;;
        *)
            echo "test.sh: '$1' is not a part; parts are lint, unit and functional, pytest's arguments come after --" >&2
            exit 2
            ;;
    esac
    shift
done
((${#parts[@]})) || parts=(lint unit functional)

scripts/lib/setup.sh
export OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE= # else every process compiles torch and Megatron anew, 20 s instead of 6
at_once=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
trap 'echo "test.sh: interrupted" >&2; [[ -z ${mypy:-} ]] || kill "$mypy" 2>/dev/null; exit 130' INT TERM HUP

results=()
failed=0

# check NAME COMMAND...: runs a command under a heading and notes how it went.
check() {
    local name=$1 started=$EPOCHREALTIME tenths word=ok
    shift
    printf '\n=== %s: %s\n' "$name" "${*#.venv/bin/}"
    "$@" || { word="FAILED ($?)" failed=1; }
    tenths=$(((${EPOCHREALTIME/[.,]/} - ${started/[.,]/}) / 100000))
    results+=("$(printf '%-18s %5d.%d s   %s' "$name" $((tenths / 10)) $((tenths % 10)) "$word")")
}

# What mypy, which takes one core for a minute beside the other checks, has found.
types() {
    local status=0
    wait "$mypy" || status=$?
    cat "$types_log"
    rm "$types_log"
    return "$status"
}

for part in "${parts[@]}"; do
    case $part in
        lint)
            types_log=$(mktemp)
            .venv/bin/mypy >"$types_log" 2>&1 &
            mypy=$!
            check "ruff check" .venv/bin/ruff check .
            check "ruff format" .venv/bin/ruff format --check .
            ;;
        unit) check "unit tests" .venv/bin/python -m pytest tests/unit "${at_once[@]}" "$@" ;;
        functional)
            check "functional tests" .venv/bin/python -m pytest tests/functional "${at_once[@]}" --durations=10 "$@"
            ;;
    esac
done

[[ -z ${mypy:-} ]] || check "mypy" types
printf '\n=== results\n'
printf '%s\n' "${results[@]}"
exit "$failed"
