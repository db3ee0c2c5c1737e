"""Layouts and plans: plain data and arithmetic about who holds which part of which matrix.

Nothing here imports torch.distributed, CUDA or Megatron, so that a layout of thousands of ranks can be read, tested and
simulated on a laptop.
"""

from megatron_muon.sharding.layout import (
    BlockedLayout,
    Layout,
    LayoutError,
    Matrix,
    Shard,
    evenly_sharded,
    from_rectangles,
    row_sharded,
)
from megatron_muon.sharding.plan import Plan, make_plan

__all__ = [
    "BlockedLayout",
    "Layout",
    "LayoutError",
    "Matrix",
    "Plan",
    "Shard",
    "evenly_sharded",
    "from_rectangles",
    "make_plan",
    "row_sharded",
]
