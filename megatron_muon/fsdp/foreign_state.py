"""State dicts of other libraries' Muons, read by this package's names and convention of momentum.

`momentum_from` reads a state dict by itself; `Muon.load_state_dict` finds out whose state it is.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.core.rows import MOMENTUM
from megatron_muon.errors import UserError
from megatron_muon.fsdp.parameter_groups import ADAMW, OPTIMIZER, Choice
from megatron_muon.matrices.cuts import box_of
from megatron_muon.ranges import number_of
from megatron_muon.shards import sharded_like

EMA = "ema"
SUM = "sum"

GROUPS = "groups of another optimizer"
"""The key of what `momentum_from` returns: for each group its members, names with state."""

_CONVENTIONS = {OPTIMIZER: EMA, "ns_coefficients": EMA, "ns_method": EMA, "algorithm": SUM}
"""Conventions of libraries by a setting that only their groups have: this package,
torch.optim.Muon, DeepSpeed, dion."""

_OF_ADAMW = {"exp_avg", "exp_avg_sq", "step"}

_OF_DION = {
    "muon": {"momentum": MOMENTUM},
    "adamw": {"momentum": "exp_avg", "variance": "exp_avg_sq", "step_dev": "step"},
}
"""Names of state by the algorithm of a group of dion; others have no meaning here."""

_WHOLE = (
    "pass whole tensors, {'state': {name: {'momentum_buffer': tensor}}}; DeepSpeed's ZeRO files"
    " hold flat partitions, which safe_get_full_optimizer_state of deepspeed.utils gathers"
)

type Slots = dict[str, Any]
type Member = tuple[Any, Slots]
"""The name of a parameter, or its number if it has none, and its state."""


def momentum_from(*state_dicts: Mapping[str, Any], convention: str) -> dict[str, Any]:
    """Converts the state of another Muon into one for `Muon.load_state_dict`.

        state = megatron_muon.momentum_from(torch_muon.state_dict(), convention="ema")
        optimizer.load_state_dict(state)

    Momentum may be `momentum_buffer` (torch.optim.Muon, DeepSpeed, Keller Jordan's code) or
    `momentum` (dion); AdamW's state `exp_avg`, `exp_avg_sq`, `step`, or dion's `momentum`,
    `variance`, `step_dev`. Learning rates and other settings are not taken.

    Args:
        state_dicts: of the optimizers of one run, such as torch.optim.Muon and AdamW: those of
            `state_dict()`, or with names as keys, as torch.distributed.checkpoint.state_dict has
            them, also flattened.
        convention: of momentum in them: "ema" for `buf = mu * buf + (1 - mu) * grad`, as here,
            "sum" for `buf = mu * buf + grad`, which is multiplied by `1 - mu` of its group.

    Raises:
        UserError: another convention than that of the library that wrote the state, state without
            meaning here, or flat partitions.
    """
    if convention not in (EMA, SUM):
        raise UserError(
            f"convention={convention!r}; choose 'ema' for buf = mu * buf + (1 - mu) * grad, or"
            " 'sum' for buf = mu * buf + grad"
        )
    groups = []
    for given in map(_unflattened, state_dicts):
        if not given.get("state"):
            raise UserError(f"no state among {', '.join(map(str, given))}; {_WHOLE}")
        # without groups, names are enough
        for group in given.get("param_groups") or [{"params": list(given["state"])}]:
            for setting, own in _CONVENTIONS.items():
                if setting in group and own != convention:
                    raise UserError(
                        f"convention={convention!r}, and momentum of groups with {setting!r} is"
                        f" {own!r}; pass convention={own!r}"
                    )
            keys = group["params"]
            members = []
            for key, name in zip(keys, group.get("param_names") or keys, strict=True):
                slots = _renamed(given["state"].get(key, {}), group)
                if MOMENTUM in slots:
                    slots[MOMENTUM] = slots[MOMENTUM].float() * _factor(group, convention)
                members.append((name, slots))
            groups.append(members)
    return {GROUPS: groups}


def _unflattened(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """State dicts with keys `state.NAME.SLOT` and `param_groups.NAME.SETTING` as nested ones."""
    if "state" in given:
        return given
    state: dict[str, Slots] = defaultdict(dict)
    groups: dict[str, Slots] = defaultdict(dict)
    for key, value in given.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        (state if kind == "state" else groups)[name][last] = value
    if not state:
        return given
    return {"state": state, "param_groups": [{**groups[n], "params": [n]} for n in groups]}


def _renamed(given: Mapping[str, Any], group: Mapping[str, Any]) -> Slots:
    """The state of a parameter by the names of this package."""
    algorithm = group.get("algorithm", "")
    names = _OF_DION.get(algorithm, {})
    slots = {names.get(slot, slot): value for slot, value in given.items()}
    if slots and algorithm == ADAMW:
        slots.setdefault("step", group["step"])
    return slots


def _factor(group: Mapping[str, Any], convention: str) -> float:
    """The number that makes momentum an average."""
    if convention == EMA:
        return 1.0
    mu = group.get("mu", group.get("momentum"))
    if mu is None:
        raise UserError("a sum needs the momentum of its group; put it into its param_groups")
    return 1.0 - float(number_of(mu))


def in_own_form(
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    choices: Mapping[torch.Tensor, Choice],
) -> dict[str, Any]:
    """The state dict of a Muon with these groups, with the state that `momentum_from` returned.

    Collective if `given` has DTensors that are sharded otherwise.
    """
    members = [member for group in given[GROUPS] for member in group]
    if all(isinstance(name, str) for name, _ in members):
        named = {name: slots for name, slots in members if slots}
        found = {p: named.get(each.name, {}) for p, each in choices.items()}
    else:
        found = _in_order(given[GROUPS], groups)
    state: list[Slots] = []
    fresh = []
    packed = []
    for group in groups:
        first = len(state)
        for p in group["params"]:
            name = choices[p].name
            slots = found.get(p, {})
            if group[OPTIMIZER] == ADAMW and not slots:
                fresh.append(name)
            elif slots.keys() != (_OF_ADAMW if group[OPTIMIZER] == ADAMW else {MOMENTUM}):
                raise UserError(
                    f"{name} is {group[OPTIMIZER]}'s here, and its state to load is"
                    f" {sorted(slots) or 'missing'}; pass the state dicts of all optimizers and"
                    " ranks, by the names that parameters have here, and choose by matrices= and"
                    " exclude= as that run did"
                )
            state.append({slot: _placed(name, p, slots[slot]) for slot in slots})
        packed.append({**group, "params": list(range(first, len(state)))})
    if fresh:
        warnings.warn(
            f"AdamW's state of {len(fresh)} parameters starts at zero, as the state to load has"
            f" none; the first is {fresh[0]}",
            stacklevel=4,
        )
    return {"state": dict(enumerate(state)), "param_groups": packed}


def _in_order(
    theirs: Sequence[Sequence[Member]],
    ours: Sequence[Mapping[str, Any]],
) -> dict[torch.Tensor, Slots]:
    """State for parameters of equal groups: those of one shape in their order.

    Some Muons sort a group by shapes, and keep the order of equal ones.
    """
    found: dict[torch.Tensor, Slots] = {}
    for slot in (MOMENTUM, "exp_avg"):
        given = [[slots for _, slots in group if slot in slots] for group in theirs]
        given = [group for group in given if group]
        is_adamw = slot != MOMENTUM
        own = [group["params"] for group in ours if (group[OPTIMIZER] == ADAMW) is is_adamw]
        sizes, expected = list(map(len, given)), list(map(len, own))
        if sizes and sizes != expected:
            raise UserError(
                f"the state to load has no names, and {slot} for groups of {sizes} parameters, not"
                f" {expected}; put names into 'param_names' of its param_groups"
            )
        for group, members in zip(given, own, strict=False):
            by_shape = defaultdict(list)
            for slots in group:
                by_shape[slots[slot].shape].append(slots)
            for p in members:
                if of_shape := by_shape[p.shape]:
                    found[p] = of_shape.pop(0)
    return found


def _placed(name: str, p: torch.Tensor, value: Any) -> Any:
    """State, whole or sharded, as sharded as its parameter; steps as a tensor."""
    value = torch.as_tensor(value)
    if not value.ndim:
        return value.float().cpu()
    if value.shape != p.shape:
        raise UserError(
            f"the state to load has shape {tuple(value.shape)} for {name}, which has"
            f" {tuple(p.shape)}; {_WHOLE}"
        )
    if isinstance(value, DTensor):
        if isinstance(p, DTensor) and value._spec == p._spec:
            return value
        value = value.full_tensor()
    offsets, sizes = box_of(name, p)
    box = [slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)]
    return sharded_like(p, value[tuple(box)].to(p.device).contiguous())
