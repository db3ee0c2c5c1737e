"""A method's state in checkpoints: of each parameter and slot a flat fp32 tensor.

Blocks have their state on the rank that owns their matrix, and in no other place. In a checkpoint
the blocks of a parameter follow one another, matrix after matrix, sharded evenly over the ranks of
the parameter's mesh. So any number of ranks can load it, with other owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensors
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _utils as dtensor_utils

from megatron_muon.core.build import GATHERED, LOCAL, Waves
from megatron_muon.core.wave import Wave
from megatron_muon.errors import SettingError
from megatron_muon.shards import local_part


class MethodState:
    """State of the blocks that this rank owns, and the way to and from its shares in checkpoints.

    Args:
        viewed: parameters with the `numbers` of their matrices.

    Attributes:
        nbytes: of this rank's blocks.

    Raises:
        SettingError: matrices are parts of parameters.
    """

    def __init__(self, waves: Waves, viewed: Mapping[Tensor, Any]) -> None:
        self._viewed = viewed
        self._scheme = waves.scheme
        self._group = waves.transport.group
        self._device = waves.memory.tensor.device
        self._owned: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)
        self.nbytes = 0
        matrices = waves.transport.layout.matrices
        self._numels = [waves.method.state_numels(matrix) for matrix in matrices]
        if not waves.method.has_state:
            return
        for wave in waves.all:
            for each in (wave, *wave.batches):
                self._find(each)
        sizes = {p.device_mesh.size() for p in viewed if isinstance(p, DTensor)}
        if self._scheme != LOCAL and sizes - {self._group.size()}:
            raise SettingError(
                "muon_tp_mode",
                "blockwise",
                f"cannot be: {type(waves.method).__name__} keeps state of whole matrices",
                "leave it out",
            )

    def _find(self, wave: Wave) -> None:
        """Note the state of a wave's blocks, by slot name, matrix and block."""
        slots = iter(wave.route.slots)
        for stack in wave.stacks:
            for number in range(len(stack.blocks)):
                block = next(slots)
                for slot, state in stack.state.items():
                    self._owned[slot, block.index][block.block] = state[number]
                    self.nbytes += state[number].nbytes

    def numels(self, p: Tensor) -> dict[str, int]:
        """Elements of the state of a parameter, by slot name."""
        numbers = self._viewed[p].numbers  # of equal matrices
        totals: dict[str, int] = {}
        for block in self._numels[numbers[0]]:
            for slot, numel in block.items():
                totals[slot] = totals.get(slot, 0) + numel * len(numbers)
        return totals

    def of_matrix(self, index: int) -> list[dict[str, Tensor]]:
        """State of each block of a matrix by slot, flat, on the host of every rank. Collective."""
        found = []
        for block, numels in enumerate(self._numels[index]):
            slots = {}
            for slot, numel in numels.items():
                whole = torch.zeros(numel, dtype=torch.float32, device=self._device)
                owned = self._owned.get((slot, index), {})
                if block in owned:
                    whole.copy_(owned[block].reshape(-1))
                if self._scheme not in (GATHERED, LOCAL):  # where every rank owns all
                    self._add_up(whole)
                slots[slot] = whole.cpu()
            found.append(slots)
        return found

    def save(self, *, empty: bool = False) -> dict[Tensor, dict[str, Tensor]]:
        """State of each parameter's matrices by slot name, sharded as in checkpoints.

        Collective unless it is `empty`, which leaves zeros.
        """
        state: dict[Tensor, dict[str, Tensor]] = {}
        for p in self._viewed:
            state[p] = self.zeros_of(p)
            for slot, flat in state[p].items():
                if empty:
                    continue
                for saved, loaded, whole, blocks in self._matrices(p, slot, flat):
                    for part, owned in blocks:
                        part.copy_(owned)
                    if self._scheme != GATHERED:  # where every rank owns all
                        self._add_up(whole)
                    saved.copy_(loaded)
        return state

    def zeros_of(self, p: Tensor) -> dict[str, Tensor]:
        """State of a parameter's matrices before the first step, sharded as in checkpoints."""
        return {slot: self._zeros(p, numel) for slot, numel in self.numels(p).items()}

    def load(self, p: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Take a parameter's state that `save` has returned, here or on other ranks. Collective."""
        for slot in self.numels(p):
            if slot in saved:
                for share, common, whole, blocks in self._matrices(p, slot, saved[slot]):
                    common.copy_(share)
                    self._add_up(whole)
                    for part, owned in blocks:
                        owned.copy_(part)

    def _zeros(self, p: Tensor, numel: int) -> Tensor:
        """Zeros that are sharded as in checkpoints."""
        if not isinstance(p, DTensor):
            return torch.zeros(numel, dtype=torch.float32, device=p.device)
        mesh = p.device_mesh
        placements = [Replicate() if self._scheme == LOCAL else Shard(0)] * mesh.ndim
        return dtensors.zeros(
            numel,
            dtype=torch.float32,
            device_mesh=mesh,
            placements=placements,
        )

    def _matrices(
        self, p: Tensor, slot: str, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
        """Zeros for the state of each matrix, on every rank, as views of them and of `flat`.

        Yields the elements that this rank has of `flat`, the same ones among the zeros, all of
        these, and the parts that are blocks of this rank, with their state.
        """
        share = local_part(flat)
        first = 0
        if isinstance(flat, DTensor):
            _, (first,) = dtensor_utils.compute_local_shape_and_global_offset(
                flat.shape,
                flat.device_mesh,
                flat.placements,
            )
        for number in self._viewed[p].numbers:
            sizes = [block[slot] for block in self._numels[number]]
            whole = torch.zeros(
                sum(sizes),
                dtype=torch.float32,
                device=self._device,
            )
            owned = self._owned.get((slot, number), {})
            blocks = []
            for block, part in enumerate(whole.split(sizes)):
                if block in owned:
                    blocks.append((part.view(owned[block].shape), owned[block]))
            low = max(first, 0)
            high = max(low, min(first + len(share), len(whole)))
            yield share[low - first : high - first], whole[low:high], whole, blocks
            first -= len(whole)

    def _add_up(self, whole: Tensor) -> None:
        """Sum over all ranks as integers: of an element all but one are 0, so no bit changes."""
        if self._group.size() > 1:
            dist.all_reduce(whole.view(torch.int32), group=self._group)
