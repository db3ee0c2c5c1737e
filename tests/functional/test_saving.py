"""Every common way of saving an optimizer, under every placement: a fresh one that loads it goes on
to the bit.

A run of three steps is saved in each way after two. A fresh model and a fresh optimizer, with other
weights and settings, load that and take the third step; then weights, state and parameter groups
are those of the run.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

from megatron_muon.errors import UserError
from tests.support import frameworks
from tests.support.frameworks import WIDTH, Net
from tests.support.pool import Pool
from tests.support.wide import wide_but

SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"moment2_method": "normuon"},
    "host": {"offload": "cpu"},
    "bf16 on disk": {"momentum_dtype": "bf16", "offload": "nvme"},
}


class Mixture(Net):
    """Matrices, vectors and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(0.1 * torch.randn(5, WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        x = (
            x
            + self.back(self.narrow(x))
            + torch.einsum(
                "...i,eio->...o",
                x,
                self.experts,
            )
        )
        scores = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(
            scores.flatten(0, 1),
            tokens[:, 1:].flatten(),
        )


# ------------------------------------------------------------------------------------------------
# placements


def alone(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Any, *shape: int) -> nn.Module:
    names = ("replicate", "shard")[-max(len(shape), 1) :]
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp2(model, 2, 2)


def fsdp2_tp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


class Placement(NamedTuple):
    ranks: int
    place: Callable[[nn.Module], nn.Module]


PLACEMENTS = {
    "one process": Placement(1, alone),
    "ddp": Placement(2, ddp),
    "fsdp2": Placement(2, fsdp2),
    "hsdp": Placement(4, hsdp),
    "fsdp2 x tp": Placement(4, fsdp2_tp),
}

# ------------------------------------------------------------------------------------------------
# ways of saving


class Run:
    """A model and its optimizer, of which `bits` is all that a checkpoint has to keep."""

    def __init__(
        self,
        placement: str,
        settings: Mapping[str, Any],
        *,
        seed: int,
        lr: float,
    ) -> None:
        torch.manual_seed(seed)
        self.model = PLACEMENTS[placement].place(Mixture())
        self.optimizer = frameworks.muon(self.model, **{"lr": lr, **settings})

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()

    def bits(self) -> dict[str, Any]:
        """This rank's part of all weights and all state, and what groups say, by its place."""
        found = {"weights": dict(self.model.named_parameters()), **self.optimizer.state_dict()}
        leaves, _ = pytree.tree_flatten_with_path(
            found, is_leaf=lambda value: isinstance(value, tuple)
        )
        return {
            pytree.keystr(path): local(value).clone() if isinstance(value, torch.Tensor) else value
            for path, value in leaves
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


class Way(NamedTuple):
    """How to save a run in a folder, and how a fresh run loads it."""

    save: Callable[[Run, Path], None]
    load: Callable[[Run, Path], None]


def own_file(folder: Path) -> Path:
    return folder / f"{dist.get_rank()}.pt"


def save_by_rank(run: Run, folder: Path) -> None:
    torch.save(
        [run.model.state_dict(), run.optimizer.state_dict()],
        own_file(folder),
    )


def load_by_rank(run: Run, folder: Path) -> None:
    weights, state = torch.load(own_file(folder), weights_only=True)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(state)


def state_of(run: Run, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optimizer = of_torch.get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


def set_state(
    run: Run,
    state: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> None:
    of_torch.set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def by_dcp(options: StateDictOptions | None = None) -> Way:
    """torch's distributed checkpoints of state dicts with these options."""

    def save(run: Run, folder: Path) -> None:
        dcp.save(state_of(run, options), checkpoint_id=folder)

    def load(run: Run, folder: Path) -> None:
        dcp.load(state := state_of(run, options), checkpoint_id=folder)
        set_state(run, state, options)

    return Way(save, load)


def whole_dicts(*, broadcast: bool, flat: bool = False) -> Way:
    """Whole tensors, written by rank 0; read by all ranks, or by rank 0, which broadcasts."""
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat
    )

    def save(run: Run, folder: Path) -> None:
        state = state_of(run, options)
        if dist.get_rank() == 0:
            torch.save(state, folder / "whole.pt")
        dist.barrier()

    def load(run: Run, folder: Path) -> None:
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0 or not broadcast:
            state = torch.load(folder / "whole.pt", weights_only=True)
        how = StateDictOptions(
            full_state_dict=True, cpu_offload=True, broadcast_from_rank0=broadcast
        )
        # `set_state_dict` takes an empty dict, as other ranks have, for nothing to load, and rank 0
        # waits for ever.
        of_torch.set_model_state_dict(run.model, state["model"], options=how)
        of_torch.set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=how)

    return Way(save, load)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WAYS: dict[str, Way] = {
    "torch.save by rank": Way(save_by_rank, load_by_rank),
    "dcp": by_dcp(),
    "dcp, flattened": by_dcp(FLAT),
    "whole": whole_dicts(broadcast=False),
    "whole, flattened, broadcast": whole_dicts(broadcast=True, flat=True),
}


def different(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
) -> list[str]:
    """The places where two runs differ, also in the type of a number."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return type(one) is type(other) and one == other

    return [place for place, value in expected.items() if not same(found[place], value)]


def saved_and_loaded(
    rank: int,
    world_size: int,
    *,
    placement: str,
    settings: Mapping[str, Any],
    folder: str,
    ways: list[str],
) -> dict[str, Any]:
    """In a worker: for each way what differs after it."""
    torch.set_num_threads(1)
    given = {
        **settings,
        **({"offload_dir": folder} if settings.get("offload") == "nvme" else {}),
    }
    first, second, third = frameworks.tokens(3)
    run, found = (
        Run(
            placement,
            given,
            seed=0,
            lr=0.02,
        ),
        dict[str, Any](),
    )
    run.step(first)
    run.step(second)
    for way in ways:
        place = Path(folder, way)
        place.mkdir(exist_ok=True)
        WAYS[way].save(run, place)
    run.step(third)
    expected = run.bits()
    run.optimizer.close()
    for way in ways:
        other = Run(placement, given, seed=1, lr=0.5)
        WAYS[way].load(other, Path(folder, way))
        other.step(third)
        found[way] = different(other.bits(), expected)
        other.optimizer.close()
    return found


CASES = {
    "one process": "bf16 on disk",
    "ddp": "normuon",
    "fsdp2": "host",
    "hsdp": "muon",
    "fsdp2 x tp": "muon",
}
"""A setting for each placement."""


@pytest.mark.parametrize("placement", wide_but(["ddp", "fsdp2 x tp"], CASES))
def test_each_way_of_saving_goes_on_to_the_bit(ranks: Pool, placement: str, tmp_path: Path) -> None:
    """Story: `torch.save` of a sharded optimizer's state dict ended in "invalid python storage",
    and one entry of a group, betas, came back from whole state dicts as a list.
    """
    ways = list(WAYS)
    if placement == "fsdp2 x tp":
        # torch's `distribute_tensor` ends in an assertion for `_StridedShard`, whatever the
        # optimizer
        ways.remove("whole")
    settings = SETTINGS[CASES[placement]]
    given = {"settings": settings, "ways": ways, "folder": str(tmp_path)}
    size = PLACEMENTS[placement].ranks
    for found in ranks(size, saved_and_loaded, placement=placement, **given):
        assert found == {way: [] for way in ways}


# ------------------------------------------------------------------------------------------------
# Megatron


OF_MEGATRON: dict[str, dict[str, Any]] = {
    "swiglu": {"swiglu": True},
    "host": {"optimizer": {"muon_offload": "cpu"}},
}


def saved_by_megatron(rank: int, world_size: int, *, kind: str) -> Any:
    """In a worker: differences after `torch.save` of the sharded state dict, and refusals."""
    from tests.support.case import Case
    from tests.support.model import Trainer

    torch.set_num_threads(1)
    case = Case(**OF_MEGATRON[kind])
    trainer, other = Trainer(case), Trainer(case)
    trainer.step()
    before = trainer.bits()
    state = trainer.optimizer.sharded_state_dict(
        trainer.model.state_dict(), metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
    )
    assert trainer.bits().keys() == before.keys(), "saving has added to the optimizer's state"
    torch.save(copy.deepcopy(state), file := io.BytesIO())
    file.seek(0)
    other.step(lambda name, shape, step: torch.ones(shape))
    for name, parameter in other.parameters.items():
        parameter._local_tensor.copy_(trainer.parameters[name]._local_tensor)
    # from then on the model shows the parameters that the optimizer has
    other.model.state_dict()
    other.optimizer.load_state_dict(torch.load(file, weights_only=False))
    trainer.step()
    other.step()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(trainer.optimizer)
    with pytest.raises(UserError, match="has no momentum under Megatron-FSDP; save sharded_state"):
        trainer.optimizer.state_dict()
    return different(other.bits(), trainer.bits())


@pytest.mark.parametrize("kind", wide_but(["host"], OF_MEGATRON))
def test_megatrons_sharded_state_goes_through_torch_save(ranks: Pool, kind: str) -> None:
    """Story: each call left a copy of offloaded momentum in the optimizer's state, and
    `state_dict()` ended in KeyError: 'step'.
    """
    assert ranks(2, saved_by_megatron, kind=kind) == [[], []]
