#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements/lock.txt and the package itself, and repairs what it finds broken.
#
# Run it, do not source it. quickstart.sh and test.sh do so first: it answers at once when nothing has changed since
# the last time, and waits for its turn while another set-up of the same tree is under way.
#
#   PYTHON=/path/to/python scripts/lib/setup.sh     takes that Python (3.12 or 3.13) and no other
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
VENV=$ROOT/.venv
STAMP=$VENV/.setup-complete
LOG=$VENV/setup.log
LOCK=$ROOT/requirements/lock.txt
SUPPORTED="3.12 3.13" # what megatron-core 0.19 has wheels for; the lock was made with the first
TOTAL=$(grep -c '==' "$LOCK")

unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PIP_USER=0

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# --- Has anything changed? --------------------------------------------------------------------------------------------

supported() { [[ -n $1 && " $SUPPORTED " == *" $1 "* ]]; }

# Minor version of the virtual environment's Python, such as 3.12; nothing where it does not run.
venv_version() {
    [[ -x $VENV/bin/python ]] || return 0
    "$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# What has to stay as it is for .venv to stay good: the Python, the place of the tree (which stands in the scripts of
# .venv/bin), the lock, the package's metadata.
fingerprint() {
    printf 'python %s\nroot %s\n' "$1" "$ROOT"
    cksum <"$LOCK"
    cat setup.py megatron_muon/version.py | cksum
}

complete() {
    [[ -f $STAMP ]] || return 1
    local version
    version=$(venv_version)
    supported "$version" || return 1
    [[ -z ${PYTHON:-} || $version == "$(probe "$PYTHON" | head -n 1)" ]] || return 1
    [[ $(<"$STAMP") == "$(fingerprint "$version")" ]]
}

# --- Finding a Python -------------------------------------------------------------------------------------------------

# Prints two lines: the minor version, and the interpreter to build from (never that of a virtual environment, which may
# be the one about to be replaced). A Python without venv and ensurepip (Debian splits them off) counts as unusable.
probe() {
    "$1" -c '
import sys
version = "%d.%d" % sys.version_info[:2]
try:
    import ensurepip, venv
except ImportError:
    version += " without python%s-venv" % version
if sys.maxsize < 2**32:
    version += " of 32 bits"
print(version)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null || true
}

# What is the matter with a Python, given what `probe` said of it.
verdict() { if [[ -n $1 ]]; then printf 'is Python %s' "${1%%$'\n'*}"; else printf 'does not run'; fi; }

# Prints candidates, one a line, leaving out names that are not there.
candidates() {
    local name pyenv_root=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
    if command -v pyenv >/dev/null; then
        pyenv which python 2>/dev/null || true # follows .python-version
    fi
    for name in python3 python3.12 python3.13 python; do
        command -v "$name" || true
    done
    for name in "$pyenv_root"/versions/3.1[23]*/bin/python3; do
        [[ ! -x $name ]] || printf '%s\n' "$name"
    done
    if command -v uv >/dev/null; then
        for name in $SUPPORTED; do
            UV_PYTHON_DOWNLOADS=never uv python find --no-project "$name" 2>/dev/null || true
        done
    fi
}

# Sets BASE (an interpreter) and BASE_VERSION, or ends with one line.
find_python() {
    local candidate found version seen="" preferred
    BASE="" BASE_VERSION=""
    if [[ -n ${PYTHON:-} ]]; then
        found=$(probe "$PYTHON")
        BASE_VERSION=${found%%$'\n'*} BASE=${found#*$'\n'}
        supported "$BASE_VERSION" ||
            die "PYTHON=$PYTHON $(verdict "$found"): give a Python ${SUPPORTED// / or }, or leave PYTHON unset"
        return
    fi
    preferred=$(head -n 1 .python-version)
    while IFS= read -r candidate; do
        found=$(probe "$candidate")
        version=${found%%$'\n'*}
        if supported "$version" && [[ -z $BASE || $version == "$preferred" ]]; then
            BASE=${found#*$'\n'} BASE_VERSION=$version
            [[ $version != "$preferred" ]] || break
        elif [[ -n $version ]] && ! supported "$version"; then # nothing is said of a shim with no Python behind it
            seen+="; $candidate is $version"
        fi
    done < <(candidates)
    if [[ -z $BASE ]] && command -v uv >/dev/null; then
        say "no Python $preferred here: uv fetches one"
        if uv python install "$preferred" >&2; then
            found=$(probe "$(uv python find --no-project "$preferred" 2>/dev/null)")
            BASE_VERSION=${found%%$'\n'*} BASE=${found#*$'\n'}
        fi
    fi
    supported "$BASE_VERSION" ||
        die "no Python ${SUPPORTED// / or } found (tried python3, python3.12, python3.13, python, pyenv, uv$seen):" \
            "install one, for example with 'apt install python3.12 python3.12-venv', 'pyenv install 3.12' or" \
            "'uv python install 3.12', or name it with PYTHON=/path/to/python3.12"
}

# --- Installing -------------------------------------------------------------------------------------------------------

PIP_PIDS=()

# Runs `pip install WORDS` for each argument, all at once: a pip fetches, checks and unpacks on one core. A person at a
# terminal sees pip's own progress, one pip after the other; a log gets a line every half minute.
pip_install() {
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input install) told=$SECONDS words pid failed=0
    if [[ -t 2 ]]; then
        for words in "$@"; do "${pip[@]}" $words >&2 || return; done
        return
    fi
    : >"$LOG"
    for words in "$@"; do
        "${pip[@]}" $words --progress-bar off >>"$LOG" 2>&1 &
        PIP_PIDS+=($!)
    done
    while kill -0 "${PIP_PIDS[@]}" 2>/dev/null; do
        sleep 0.2
        ((SECONDS - told >= 30)) || continue
        told=$SECONDS
        if grep -q '^Installing collected' "$LOG"; then
            say "... $SECONDS s, unpacking"
        else
            say "... $SECONDS s, fetching package $(grep -cE '^(Collecting|Processing)' "$LOG" || true) of $TOTAL:" \
                "$(sed -n 's/^Collecting \([^ ]*\).*/\1/p' "$LOG" | tail -n 1)"
        fi
    done
    for pid in "${PIP_PIDS[@]}"; do wait "$pid" || failed=1; done
    PIP_PIDS=()
    ((!failed)) || { grep '^ERROR' "$LOG" || grep -v '^WARNING' "$LOG"; } | tail -n 15 | cut -c -300 >&2
    return "$failed"
}

interrupted() {
    ((!${#PIP_PIDS[@]})) || kill "${PIP_PIDS[@]}" 2>/dev/null || true
    say "interrupted; the next run carries on from here"
    exit 130
}

# Says why .venv has to be made anew: nothing where it can stay, "there is none" where there is none.
why_remake() {
    local version
    version=$(venv_version)
    if [[ ! -e $VENV ]]; then
        printf 'there is none'
    elif ! supported "$version"; then
        printf '%s, the project needs %s' "$(verdict "$version")" "${SUPPORTED// / or }"
    elif [[ -n ${PYTHON:-} && $version != "$(probe "$PYTHON" | head -n 1)" ]]; then
        printf 'is Python %s, PYTHON=%s asks for another' "$version" "$PYTHON"
    elif [[ $(<"$VENV/bin/activate") != *"$VENV"* ]]; then
        printf 'was made for another place'
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        printf 'has no pip that runs'
    fi
}

install() {
    local why broken
    why=$(why_remake)
    if [[ -n $why ]]; then
        find_python
        [[ ! -e $VENV ]] || say ".venv $why: remaking it"
        say "making .venv with Python $BASE_VERSION ($BASE)"
        rm -rf "$VENV"
        "$BASE" -m venv "$VENV" || die "'$BASE -m venv .venv' failed: see above"
    fi
    rm -f "$STAMP"

    broken=$("$VENV/bin/python" scripts/lib/check_env.py --repair "$LOCK")
    if [[ -n $broken ]]; then
        say "installing $(wc -w <<<"$broken") of $TOTAL packages (all of them: about 5 GB on disk, a few minutes)"
        # Half of the bytes are NVIDIA's. --no-deps: the lock is complete, and nothing outside it gets in.
        grep '^nvidia-' "$LOCK" >"$VENV/nvidia.txt" || true
        grep -v '^nvidia-' "$LOCK" >"$VENV/others.txt"
        pip_install "--no-deps --no-compile -r .venv/nvidia.txt" "--no-deps --no-compile -r .venv/others.txt" ||
            die "pip could not install requirements/lock.txt: see above, then run this again"
        # What every start imports; pip would compile one file after the other, and of all packages, which takes longer
        # than it saves. Some files are no Python of today.
        "$VENV/bin/python" -m compileall -q -j 0 -x '/torch/(_inductor|testing)/' \
            "$VENV"/lib/python*/site-packages/{torch,megatron} >>"$LOG" 2>&1 || true
        broken=$("$VENV/bin/python" scripts/lib/check_env.py "$LOCK")
        [[ -z $broken ]] || die "still incomplete: $broken; remove .venv and run this again"
    fi
    pip_install "--quiet --no-deps --no-build-isolation -e ." ||
        die "pip could not install the package itself: see above"
    fingerprint "$(venv_version)" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "done in $SECONDS s: .venv has Python $(venv_version), $TOTAL packages and megatron-muon itself"
}

if complete; then exit 0; fi

system="$(uname -s) $(uname -m)"
[[ $system == "Linux x86_64" ]] ||
    die "requirements/lock.txt is for Linux x86_64, this is $system:" \
        "install by ranges instead, 'pip install -e .[megatron,hf,dev,plots]' in an environment of your own"
trap interrupted INT TERM HUP
if command -v flock >/dev/null; then
    exec 9>"$ROOT/.setup.lock"
    flock -n 9 || {
        say "another set-up of this tree is under way; waiting for it"
        flock 9
    }
    if complete; then exit 0; fi
fi
install
