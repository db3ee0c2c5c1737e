"""One choice of the symmetric kernel's configuration for all ranks of a group.

For each size of operand Triton times up to 180 configurations of emerging-optimizers' kernel. Its record on disk leaves
out kernels whose configurations have hooks, so every start tunes again: here each size by one rank, for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.core.ranks import numbers_of_all_ranks, say

_NONE = -1


def tune(sizes: Sequence[tuple[int, int]], group: dist.ProcessGroup, device: torch.device) -> None:
    """Have the ranks of `group` use the kernel with one configuration for each of the sizes `(rows, cols)`. Collective.

    A size that one of them has tuned before is not tuned again; of several choices all take that of the first rank.
    """
    missing = _agree(sizes, group)
    if not missing:
        return
    each = -(-len(missing) // group.size())
    say(
        f"megatron-muon: note: tuning the symmetric kernel, at every start: {len(missing)} sizes, "
        f"at most {each} on each rank, up to 90 s a size"
    )
    for size in missing[group.rank() :: group.size()]:
        muon_utils.triton_kernels.tsyrk_ex(torch.ones(size, dtype=torch.bfloat16, device=device))
    _agree(missing, group)


def _agree(sizes: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Give every rank the choices that some rank has; the sizes for which none has one. Collective."""
    kernel = muon_utils.triton_kernels.syrk.syrk_kernel_bf16
    keys = [(*size, False, False) for size in sizes]  # N, K, TRANS and WARP_SPECIALIZE, as the autotuner looks them up
    mine = [kernel.configs.index(kernel.cache[key]) if key in kernel.cache else _NONE for key in keys]
    missing = []
    for size, key, choices in zip(sizes, keys, zip(*numbers_of_all_ranks(mine, group), strict=True), strict=True):
        choice = next((number for number in choices if number != _NONE), _NONE)
        if choice == _NONE:
            missing.append(size)
        else:
            kernel.cache[key] = kernel.configs[choice]
    return missing
