"""Layouts and plans: plain data and arithmetic about who holds which part of which matrix.

Nothing here imports torch.distributed, CUDA or Megatron, so that a layout of thousands of ranks can be read, tested and
simulated on a laptop.
"""

from megatron_muon.sharding.layout import Layout, LayoutError, Matrix, Shard, row_sharded

__all__ = ["Layout", "LayoutError", "Matrix", "Shard", "row_sharded"]
