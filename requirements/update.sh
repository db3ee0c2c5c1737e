#!/usr/bin/env bash
# Writes requirements/lock.txt anew: the newest versions within setup.py's ranges, resolved in an environment of its own.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/lib/setup.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --disable-pip-version-check -e ".[megatron,hf,dev,plots]"
{
    sed '/^[^#]/,$d' requirements/lock.txt
    "$work/venv/bin/python" -m pip freeze --exclude megatron-muon | sort -f
} >"$work/lock.txt"
mv "$work/lock.txt" requirements/lock.txt
git --no-pager diff --stat -- requirements/lock.txt
echo "Now run scripts/test.sh: it installs the new versions and tests with them."
