"""What `python -m benchmarks.stages` does before it measures: the cut, its look at what comes back, what it refuses."""

import pytest
import torch

from benchmarks import stages
from benchmarks.layouts import fsdp_layout, gpt_layout

RANKS = 4


def test_rows_that_do_not_come_back_are_found():
    layout = gpt_layout(RANKS, 64, 2)
    rows = stages.Rows(layout, 1)
    held = [index for index, shard in enumerate(layout.held(1)) if shard.numel]
    finite = torch.ones(len(held), dtype=torch.bool)
    given = [row.bfloat16() for row in rows.prepare(held)]
    rows.finalize(held, given, finite)
    assert rows.finalized == rows.numel > 0
    with pytest.raises(RuntimeError, match=f"matrix {held[-1]}: other rows came back"):
        rows.finalize(held, [*given[:-1], -given[-1]], finite)


def test_layers_are_cut_as_buckets():
    """A rank has an equal piece of a layer, which begins and ends within matrices, and not a part of each matrix."""
    even, cut = gpt_layout(RANKS, 64, 2), fsdp_layout(RANKS, 64, 2)
    assert [(m.name, m.shape, m.split) for m in cut.matrices] == [(m.name, m.shape, m.split) for m in even.matrices]
    for layer in (cut.matrices[:4], cut.matrices[4:]):
        pieces = [sum(shard.numel for m in layer for shard in m.shards if shard.rank == r) for r in range(RANKS)]
        assert pieces == [12 * 64 * 64 // RANKS] * RANKS
        assert min(len(m.shards) for m in layer) == 1


@pytest.mark.parametrize("ranks", ["4", "6"])
def test_nodes_that_do_not_fit_are_refused(ranks, capsys):
    with pytest.raises(SystemExit):
        stages.main(["--ranks", "8", ranks, "--node-ranks", "4"])
    assert f"--ranks {ranks} --node-ranks 4: two nodes or more are needed" in capsys.readouterr().err
