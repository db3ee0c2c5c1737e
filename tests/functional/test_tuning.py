"""The symmetric kernel's tuning: Triton's own autotuner, with given timings and a launch that does nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.pool import Pool

Found = tuple[int, int, dict[tuple[int, int], str], str]


def tuned(rank: int, world_size: int, *, hand_on: bool = True, earlier: bool = False, **settings: Any) -> Found:
    """In a worker: timings taken at construction and in a step, the choice for each size, and what was printed.

    Rank 0 finds the first configuration fastest, other ranks the last. `earlier` has rank 1 know one size before.
    """
    import contextlib
    import io
    from dataclasses import replace

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import megatron_muon
    from megatron_muon.core import build, orthogonalize
    from megatron_muon.core import newton_schulz as ns
    from megatron_muon.core.cost import DENSE, KERNEL

    small = replace(KERNEL, from_rows=16)
    kernel = ns.muon_utils.triton_kernels.syrk.syrk_kernel_bf16
    timed: list[int] = []

    def do_bench(call: Any, quantiles: Any) -> list[float]:
        timed.append(1)
        return [float(len(timed) if rank == 0 else -len(timed))] * 3

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for module in (ns, orthogonalize):
            patch.setattr(module, "KERNEL", small)
        patch.setattr(ns, "products_on", lambda device, dtype: small if dtype == torch.bfloat16 else DENSE)
        patch.setattr(kernel, "cache", {})
        patch.setitem(vars(kernel), "do_bench", do_bench)
        patch.setattr(kernel.fn, "run", lambda *args, **options: None)
        if not hand_on:
            patch.setattr(build, "tune", lambda sizes, group, device: None)
        if earlier and rank == 1:
            kernel.cache[64, 64, False, False] = kernel.configs[7]
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, matrices=["*"], **settings)
        at_construction = len(timed)
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        choices = {(key[0], key[1]): str(config) for key, config in kernel.cache.items()}
        return at_construction, len(timed) - at_construction, choices, printed.getvalue()


EACH = 180  # configurations of a size below 5,000 rows


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"team_size": "1"}, [(64, 64), (64, 256)]),
        ({"team_size": "2"}, [(64, 64), (64, 128)]),
        ({"exchange": "allgather"}, [(64, 64), (64, 256)]),
    ],
)
def test_each_size_of_the_symmetric_kernel_is_tuned_by_one_rank_for_all(ranks: Pool, settings: Any, sizes: Any) -> None:
    """Every rank tuned every size that it met, without a word, and ranks of a team could choose differently."""
    first, second = ranks(2, tuned, **settings)
    assert first[0] == second[0] == EACH
    assert first[1] == second[1] == 0
    assert sorted(first[2]) == sizes
    assert first[2] == second[2]
    assert len(set(first[2].values())) == 2  # each has the choice of the rank that tuned it
    assert re.search("tuning the symmetric kernel, at every start: 2 sizes, at most 1 on each rank", first[3])
    assert "tuning" not in second[3]


def test_without_handing_choices_on_each_rank_tunes_all_sizes_and_choices_differ(ranks: Pool) -> None:
    """The negative control."""
    first, second = ranks(2, tuned, hand_on=False, team_size="2")
    assert first[0] == second[0] == 2 * EACH
    assert all(first[2][size] != second[2][size] for size in first[2])


def test_a_size_that_a_rank_has_tuned_before_is_not_tuned_again(ranks: Pool) -> None:
    """As when optimizers of overlapping groups are made one after the other."""
    first, second = ranks(2, tuned, earlier=True, team_size="2")
    assert (first[0], second[0]) == (EACH, 0)
    assert first[2] == second[2]
