"""Every way in which ranks hold the weights of a model, as DTensors on one mesh or several, cut by
`torch.chunk`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard


@dataclass(frozen=True)
class Cut:
    """A mesh and the placements on it: `S0` is Shard(0), `s0` a _StridedShard(0), `R` Replicate.

    `sets` has the ranks of several meshes, each of which holds experts of its own, in this order.
    """

    mesh: tuple[int, ...]
    placements: str
    sets: tuple[tuple[int, ...], ...] = ()

    def of(self, shape: Sequence[int]) -> list[Placement]:
        """The placements of a parameter: Replicate for dimensions that it lacks, rows of a
        convolution.
        """
        is_convolution = len(shape) > 3 and shape[-1] == shape[-2]
        found: list[Placement] = []
        for place, one in enumerate(self.placements.split()):
            dim = int(one[1:] or 0) if one != "R" else 0
            dim = 0 if is_convolution else dim
            if one == "R" or dim >= len(shape):
                found.append(Replicate())
            elif one[0] == "s":
                later = zip(
                    self.placements.split()[place + 1 :], self.mesh[place + 1 :], strict=True
                )
                factor = math.prod(size for other, size in later if other == f"S{dim}")
                found.append(_StridedShard(dim, split_factor=factor))
            else:
                found.append(Shard(dim))
        return found


PLAIN = Cut((), "")


def _along(placements: str, experts: str = "") -> dict[int, tuple[Cut, Cut]]:
    return {
        size: (Cut((size,), placements), Cut((size,), experts or placements))
        for size in (1, 2, 3, 4)
    }


def _on(text: str) -> dict[int, tuple[Cut, Cut]]:
    """A mesh, and the placements of dense weights, on all of it or flat, and of experts."""
    sizes, dense, experts = (part.strip() for part in text.split("|"))
    mesh = tuple(map(int, sizes.split()))
    size = math.prod(mesh)
    of_dense = Cut(mesh, dense) if " " in dense else Cut((size,), dense)
    return {size: (of_dense, Cut(mesh, experts))}


LAYOUTS: dict[str, dict[int, tuple[Cut, Cut]]] = {
    "plain": {1: (PLAIN, PLAIN), 2: (PLAIN, PLAIN)},
    "fsdp": _along("S0"),
    "fsdp within experts": _along("S0", "S1"),
    "columns": _along("S-1"),
    "columns of experts": _along("R", "S2"),
    "hsdp": _on("2 2 | R S0 | R S0"),
    "replicas inside": _on("2 2 | S0 R | S1 R"),
    "ep x fsdp": _on("2 2 | S0 | s0 S0"),
    "ep 1 x fsdp": _on("3 1 | S0 | s0 S0"),
    "ep x fsdp within": _on("2 2 | S0 | S1 S0"),
    "ep x tp": _on("2 2 | R S0 | S0 S1"),
    "fsdp x tp": _on("2 2 | s0 S0 | S0 S1"),
    "tp within fsdp": _on("2 2 | s0 S0 | s1 S1"),
    "fsdp x ep x tp": _on("2 1 2 | s0 R S0 | S1 S0 S2"),
    "hsdp x ep": _on("1 2 2 | R S0 R | R s0 S0"),
    "replicas of all": _on("2 2 | S0 | R R"),
    "shards of shards": _on("2 2 | S0 S0 | S0 S0"),
    "plain beside fsdp": {
        size: (
            PLAIN,
            Cut((size,), "S0"),
        )
        for size in (2, 4)
    },
    "experts apart": {
        2: (
            Cut((2,), "S0"),
            Cut((1,), "S0", ((0,), (1,))),
        ),
        4: (
            Cut((4,), "S0"),
            Cut((2,), "S1", ((0, 1), (2, 3))),
        ),
    },
    "experts apart, unequal": {
        4: (
            Cut((4,), "S0"),
            Cut((), "S0", ((0,), (1, 2, 3))),
        ),
    },
    "crossing": {
        4: (
            Cut((2,), "S0", ((0, 1), (2, 3))),
            Cut((2,), "S0", ((0, 2), (1, 3))),
        )
    },
}
"""For numbers of ranks, how they hold dense weights and how experts."""


@functools.cache
def _mesh(
    shape: tuple[int, ...],
    sets: tuple[tuple[int, ...], ...],
) -> tuple[DeviceMesh, int, int]:
    """This rank's mesh, its number among the `sets`, and how many these are. Collective."""
    if not sets:
        return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape)), 0, 1
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in sets]
    number = next(number for number, ranks in enumerate(sets) if dist.get_rank() in ranks)
    return meshes[number], number, len(sets)


def part_of(
    whole: torch.Tensor,
    mesh: tuple[int, ...],
    place: Sequence[int],
    placements: Sequence[Placement],
) -> Any:
    """What a rank holds: one axis of the mesh cuts after the other, _StridedShard last, as FSDP
    does after EP or TP.
    """
    for axis in sorted(
        range(len(mesh)), key=lambda axis: isinstance(placements[axis], _StridedShard)
    ):
        cut = placements[axis]
        if not isinstance(cut, Replicate):
            pieces = whole.chunk(mesh[axis], dim=cut.dim)  # type: ignore[attr-defined]
            empty = pieces[0].narrow(cut.dim, 0, 0)  # type: ignore[attr-defined]
            whole = pieces[place[axis]] if place[axis] < len(pieces) else empty
    return whole


class Held:
    """What this rank holds of weights or gradients in a layout. Making the first is collective."""

    def __init__(self, layout: str) -> None:
        self._cuts = LAYOUTS[layout][dist.get_world_size() if dist.is_initialized() else 1]

    def _cut(
        self, name: str, whole: torch.Tensor
    ) -> tuple[Cut, torch.Tensor, tuple[DeviceMesh, int, int] | None]:
        cut = self._cuts[".experts." in name]
        if cut == PLAIN:
            return cut, whole, None
        found = _mesh(cut.mesh, cut.sets)
        if cut.sets and ".experts." in name and len(whole) > 1:  # every set has some
            whole = whole.tensor_split(found[2])[found[1]]
        return cut, whole, found

    def local(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        cut, whole, found = self._cut(name, whole)
        if found is None:
            return whole
        mesh = found[0]
        place = mesh.get_coordinate()
        assert place is not None
        return part_of(whole, tuple(mesh.mesh.shape), place, cut.of(whole.shape))

    def tensor(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The same as a DTensor where it is one, in memory of its own."""
        local = self.local(name, whole).clone(memory_format=torch.contiguous_format)
        cut, whole, found = self._cut(name, whole)
        if found is None:
            return local
        return DTensor.from_local(
            local,
            found[0],
            cut.of(whole.shape),
            run_check=False,
            shape=whole.shape,
            stride=whole.contiguous().stride(),
        )

    def parameters(self, wholes: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        """Parameters with these values."""
        return {
            name: nn.Parameter(
                self.tensor(name, whole),
            )
            for name, whole in wholes.items()
        }

    def give(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """Give parameters their parts of whole gradients, none where there is none."""
        for name, p in parameters.items():
            p.grad = self.tensor(name, gradients[name]) if name in gradients else None

    def differences(
        self,
        parameters: Mapping[str, torch.Tensor],
        wholes: Mapping[str, torch.Tensor],
    ) -> dict[str, float]:
        """The largest difference between each parameter here and its part of the whole."""
        found = {}
        for name, p in parameters.items():
            mine, theirs = local_of(p), self.local(name, wholes[name])
            assert mine.shape == theirs.shape, (name, mine.shape, theirs.shape)
            found[name] = (
                float(
                    (mine - theirs).abs().max(),
                )
                if mine.numel()
                else 0.0
            )
            if math.isnan(found[name]):
                found[name] = math.inf
        return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def move(parameter: torch.Tensor) -> None:
    """Put a parameter's values into other memory, as FSDP2 does when a model is loaded or moved."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.clone()
    else:
        parameter.data = parameter.data.clone()


def in_watched_memory(parameter: torch.Tensor) -> Any:
    """Put a parameter's gradient into memory of numpy's, which can be watched; returns the
    array.
    """
    array = local_of(parameter.grad).numpy().copy()  # type: ignore[arg-type]
    local, gradient = torch.from_numpy(array), parameter.grad
    if isinstance(gradient, DTensor):
        spec = gradient._spec
        local = DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    parameter.grad = local
    return array


def bits(parameters: Mapping[str, torch.Tensor]) -> bytes:
    """All that this rank holds."""
    return b"".join(
        np.ascontiguousarray(local_of(p).numpy()).tobytes() for p in parameters.values()
    )


def tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has parameters of these names, for torch's state dicts."""
    root = nn.Module()
    for name, p in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, p)
    return root
