"""A method's state in checkpoints: of each parameter and slot a flat fp32 tensor.

Blocks have their state on the rank that owns their matrix, and in no other place. In a checkpoint
the blocks of a parameter follow one another, matrix after matrix, sharded evenly over the ranks of
the parameter's mesh. So any number of ranks can load it, with other owners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        parameters: of all matrices.

    Attributes:
        nbytes: of this rank's blocks.

    Raises:
        SettingError: matrices are parts of parameters.
    """

    def __init__(self, waves: Waves, parameters: Iterable[Tensor]) -> None:
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
        ranks = self._group.size()
        sharded = [p for p in parameters if isinstance(p, DTensor)]
        if self._scheme != LOCAL and any(p.device_mesh.size() != ranks for p in sharded):
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
                for slot, state in (stack.state or {}).items():
                    self._owned[slot, block.index][block.block] = state[number]
                    self.nbytes += state[number].nbytes

    def numels(self, numbers: Sequence[int]) -> dict[str, int]:
        """Elements of the state of a parameter with these matrices, by slot name."""
        found: dict[str, int] = {}
        for number in numbers:
            for slot, numel in self._numels[number].items():
                found[slot] = found.get(slot, 0) + numel
        return found

    def save(
        self,
        p: Tensor,
        numbers: Sequence[int],
        *,
        empty: bool = False,
    ) -> dict[str, Tensor]:
        """State of a parameter's matrices by slot name, sharded as in checkpoints.

        Collective unless it is `empty`, which leaves zeros.
        """
        found = {}
        for slot, numel in self.numels(numbers).items():
            found[slot], first = self._zeros(p, numel)
            if not empty:
                share = local_part(found[slot])
                for number, start in self._starts(slot, numbers):
                    whole = self._collect(slot, number)
                    here, there = _common(share, first, whole, start)
                    here.copy_(there)
        return found

    def load(
        self,
        p: Tensor,
        numbers: Sequence[int],
        saved: Mapping[str, Tensor],
    ) -> None:
        """Take state that `save` has returned, here or on other ranks. Collective."""
        for slot, numel in self.numels(numbers).items():
            if slot not in saved:
                continue
            _, first = self._zeros(p, numel)
            share = local_part(saved[slot])
            for number, start in self._starts(slot, numbers):
                whole = self._whole(slot, number)
                here, there = _common(share, first, whole, start)
                there.copy_(here)
                self._add_up(whole)
                for part, owned in self._parts(whole, slot, number):
                    owned.copy_(part)

    def _zeros(self, p: Tensor, numel: int) -> tuple[Tensor, int]:
        """Zeros that are sharded as in checkpoints, and the first element that this rank has."""
        if not isinstance(p, DTensor):
            return torch.zeros(numel, dtype=torch.float32, device=p.device), 0
        mesh = p.device_mesh
        placements = [Replicate() if self._scheme == LOCAL else Shard(0)] * mesh.ndim
        made = dtensors.zeros(
            numel,
            dtype=torch.float32,
            device_mesh=mesh,
            placements=placements,
        )
        _, (first,) = dtensor_utils.compute_local_shape_and_global_offset(
            made.shape,
            mesh,
            placements,
        )
        return made, first

    def _starts(self, slot: str, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Matrices, with the first element of each in the state of their parameter."""
        start = 0
        for number in numbers:
            yield number, start
            start += self._numels[number][slot]

    def _whole(self, slot: str, number: int) -> Tensor:
        """Zeros for the state of a matrix."""
        return torch.zeros(
            self._numels[number][slot],
            dtype=torch.float32,
            device=self._device,
        )

    def _collect(self, slot: str, number: int) -> Tensor:
        """The state of a matrix, flat, on every rank. Collective."""
        whole = self._whole(slot, number)
        for part, owned in self._parts(whole, slot, number):
            part.copy_(owned)
        if self._scheme != GATHERED:  # where every rank owns all
            self._add_up(whole)
        return whole

    def _parts(
        self,
        whole: Tensor,
        slot: str,
        number: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks of a matrix in a flat tensor, with their state, if this rank owns them."""
        start = 0
        for _, owned in sorted(self._owned.get((slot, number), {}).items()):
            end = start + owned.numel()
            yield whole[start:end].view(owned.shape), owned
            start = end

    def _add_up(self, whole: Tensor) -> None:
        """Sum over all ranks as integers: of an element all but one are 0, so no bit changes."""
        if self._group.size() > 1:
            dist.all_reduce(whole.view(torch.int32), group=self._group)


def _common(
    share: Tensor,
    first: int,
    whole: Tensor,
    start: int,
) -> tuple[Tensor, Tensor]:
    """The elements that two flat tensors have in common, which begin at `first` and `start`."""
    low = max(first, start)
    high = max(low, min(first + len(share), start + len(whole)))
    return share[low - first : high - first], whole[low - start : high - start]
