#!/usr/bin/env bash
# Installs the package into a Python that has a torch of its own, which stays as it is: an image's, a cluster module's.
#
#   scripts/containers/install.sh [PYTHON]      the Dockerfile and the Apptainer recipe run it; PYTHON is python3
#
# What was built against each other stays too: torch, triton, numpy, Transformer Engine, NVIDIA's packages; pip fails where it
# would have to replace one. NVIDIA's images hold all other packages in place as well, by PIP_CONSTRAINT; some are older than
# megatron-core needs, so that is lifted.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:-python3}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT

"$python" -c '
import importlib.metadata as of, re
kept = re.compile("(pytorch[-_.])?(torch|triton)|numpy|flash[-_.]attn|(transformer[-_.]engine|nvidia|cuda).*", re.IGNORECASE)
names = {each.metadata["Name"]: each.version for each in of.distributions() if kept.fullmatch(each.metadata["Name"] or "")}
print(*(f"{name}=={version}" for name, version in sorted(names.items())), sep="\n")
' >"$constraints"
PIP_CONSTRAINT=$constraints "$python" -m pip install --disable-pip-version-check --no-cache-dir '.[megatron,hf,plots]'

cd / # what is imported is what was installed
"$python" -m megatron_muon.cli --version
