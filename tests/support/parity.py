"""Trains cases with given gradients on several ranks, and compares weights and state with the
independent reference.

Newton-Schulz runs in fp32 on both sides and on the same blocks, no sum depends on the number of
ranks, and elementwise arithmetic is written in the same order. `tolerance` says what rounds all the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.support.case import Case, batches, gradient_of, values_of
from tests.support.model import Trainer, sabotaged
from tests.support.reference import Reference

SLOTS = {"momentum": "momentum_buffer", "second moment": "moment2_buffer"}


@dataclass(frozen=True)
class Seen:
    """Whole shapes, data-parallel ranks, and weights and state after the first step and after all
    `steps`.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: int
    steps: int
    after: dict[int, dict[str, dict[str, torch.Tensor]]]


def run(
    rank: int,
    world_size: int,
    *,
    cases: Mapping[str, Case],
    sabotage: Sequence[str] = (),
    steps: int = 4,
) -> Any:
    """In a worker: train every case; a label in `sabotage` names a bug too. A `Seen` of
    each.
    """
    seen: dict[str, Any] = {}
    for label, case in cases.items():
        trainer = Trainer(case, steps=steps)
        seen[label] = Seen(trainer.shapes, trainer.groups.dp_cp.size(), steps, {})
        with sabotaged(label if label in sabotage else ""):
            for step in range(1, steps + 1):
                assert (step_with_logits if case.clips else Trainer.step)(trainer)[0], (
                    f"{label}: a step was skipped"
                )
                if step in (1, steps):
                    state = {kind: trainer.whole_state(slot) for kind, slot in SLOTS.items()}
                    seen[label].after[step] = {"weight": trainer.whole()} | state
    return seen if rank == 0 else None


def step_with_logits(trainer: Trainer, *, scale: float = 1.0) -> Any:
    """A step with given gradients, before which the attention of every layer has kept logits as in
    a forward pass.
    """
    case, tensor_parallel = trainer.case, trainer.groups.tp
    here = case.heads // case.tensor
    mine = slice(tensor_parallel.rank() * here, (tensor_parallel.rank() + 1) * here)
    cores = [
        module.core_attention
        for module in trainer.model.modules()
        if hasattr(module, "core_attention")
    ]

    def gradient(*what: Any) -> torch.Tensor:
        for layer, core in enumerate(cores):
            seen = logits_of(case, layer, trainer.steps_done, trainer.groups.dp_cp.rank())
            core.current_max_attn_logits = seen[mine].cuda()
        return scale * gradient_of(*what)

    return trainer.step(gradient)


def logits_of(case: Case, layer: int, step: int, rank: int) -> torch.Tensor:
    """The largest logits of a layer's heads as one data-parallel rank sees them: about half are
    over the threshold.
    """
    return case.attention["qk_clip_threshold"] + 0.5 * values_of(
        f"{layer}", (case.heads,), salt=f"logits{step}/{rank}"
    )


def tolerance(case: Case) -> float:
    """How far weights and state may be from the reference.

    Under `no_shard` nothing, as upstream's own class runs there: the last bit agrees. A sharded
    Muon multiplies blocks of equal shape in batches and iterates some of them by their Gram matrix:
    products that round otherwise, by 1e-7 of an update of size 0.01 in a step. Teams sum in another
    order too, norms add up over ranks. Adaptive Muon divides by a second moment: for AdaMuon an
    element near zero turns such a rounding into a part of an update of size 0.05; with cautious
    decay its sign decides, too.
    """
    settings = case.settings
    if settings["optimizer"] == "adaptive_muon":
        normuon = settings.get("adaptive_muon_moment2_method") == "normuon"
        return (4e-6 if normuon else 1e-4) * (
            10 if settings.get("muon_cautious_weight_decay") else 1
        )
    if settings.get("muon_team_size", "1") != "1":
        return 4e-6
    if case.frozen or case.trainable is not None:
        return 1e-6
    variants = ("muon_share_replicated", "muon_hyperball", "muon_cautious_weight_decay")
    if case.strategy != "no_shard" or case.clips or any(settings.get(name) for name in variants):
        return 2e-6
    return 0.0 if settings["decoupled_weight_decay"] else 1e-6


def check(
    seen: Seen,
    case: Case,
    *,
    atol: float | None = None,
    label: str = "",
) -> None:
    """Compare with the reference on whole matrices; by default to the case's tolerance."""
    reference, clipped = Reference(case, seen.shapes, steps=seen.steps), 0
    for step in range(1, seen.steps + 1):
        reference.step()
        if case.clips:
            clipped += reference.clip(
                lambda layer, before=step - 1: largest_logits(case, layer, before, seen.ranks)
            )
        if step in seen.after:
            for kind, found in seen.after[step].items():
                expected = reference.whole() if kind == "weight" else reference.state(SLOTS[kind])
                if kind == "weight":  # some frozen ones are not the optimizer's
                    expected = {
                        name: value
                        for name, value in expected.items()
                        if name in found or case.trains(name)
                    }
                offloaded = kind != "weight" and case.settings.get("muon_offload", "none") != "none"
                if offloaded or (
                    kind == "second moment" and max(case.tensor, case.expert_tensor) > 1
                ):
                    continue  # not put together
                assert found.keys() == expected.keys(), f"{label}: {kind}"
                for name in expected:
                    torch.testing.assert_close(
                        found[name],
                        expected[name],
                        rtol=0.0,
                        atol=tolerance(case) if atol is None else atol,
                        msg=lambda text, n=name, k=kind, s=step: (
                            f"{label} {n}, {k} after {s} steps: {text}"
                        ),
                    )
    assert clipped or not case.clips, f"{label}: nothing to clip"


def largest_logits(case: Case, layer: int, step: int, ranks: int) -> Sequence[float]:
    """Of each head, the largest logit that any rank has seen."""
    of_ranks = [logits_of(case, layer, step, rank) for rank in range(ranks)]
    return torch.stack(of_ranks).amax(0).tolist()


def assert_same_bits(
    one: Seen,
    other: Seen,
    label: str = "",
    *,
    atol: float = 0.0,
) -> None:
    """Weights and state are the same, or at most `atol` apart."""
    for step in one.after:
        for kind, tensors in one.after[step].items():
            others = other.after[step][kind]
            # offloaded state is not seen
            assert not tensors or not others or tensors.keys() == others.keys(), label
            for name in tensors.keys() & others.keys():
                assert (tensors[name] - others[name]).abs().max() <= atol, (
                    f"{label}: {name}, {kind} after {step} steps"
                )


class Step(NamedTuple):
    """A training step's mean loss, gradient norm, zeros among the gradients and largest attention
    logit.
    """

    loss: float
    norm: float
    zeros: float
    logit: float


Curve = list[Step]


def curves(
    rank: int,
    world_size: int,
    *,
    cases: Mapping[str, Case],
    steps: int,
    micro_batches: int = 1,
    same: bool = False,
) -> dict[str, Curve]:
    """In a worker: train every case on batches of its own for each step, or always the `same`
    one.
    """
    seen: dict[str, Curve] = {label: [] for label in cases}
    for label, case in cases.items():
        trainer = Trainer(case, steps=steps)
        for tokens in batches(1) * steps if same else batches(steps):
            loss, (updated, norm, zeros) = trainer.train(tokens, micro_batches=micro_batches)
            assert updated, f"{label}: a step was skipped"
            logit = float(trainer.optimizer.qk_clip.largest) if case.attention else 0.0
            seen[label].append(Step(loss, float(norm), float(zeros or 0), logit))
    return seen
