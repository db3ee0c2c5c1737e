"""Every matrix of models that people train, held by ranks in every way: updates are those of whole
matrices.

Every rank gets its part of the reference's gradients (support/every_matrix.py), so weights differ
by the iteration's rounding alone, ATOL.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch

from tests.support import every_matrix as support
from tests.support import placements
from tests.support.every_matrix import SETTINGS, STEPS, WITH_SCANNED, Run, run_of
from tests.support.placements import LAYOUTS, Held
from tests.support.pool import Pool
from tests.support.wide import wide_but

# it divides elements by their own size, so those that are nearly zero by little but rounding
ATOL = {"adamuon": 3e-5}
USUAL = 1e-6
SIZES = [(layout, size) for layout, sizes in LAYOUTS.items() for size in sizes]


def runs_of(number: int) -> list[Run]:
    """Three of the pairs of a model and settings, which take turns over the layouts."""
    models, settings = list(WITH_SCANNED), list(SETTINGS)
    return [
        run_of(models[pair % 6], settings[(pair + pair // 6) % 6])
        for pair in range(3 * number, 3 * number + 3)
    ]


def advance(
    held: Held,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Any,
    gradients: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """A step with each of the gradients."""
    for each in gradients:
        held.give(parameters, each)
        optimizer.step()


def stepped(
    rank: int,
    world_size: int,
    *,
    layout: str,
    runs: list[Run],
    folder: str,
) -> Any:
    """In a worker: for each run the largest difference of each parameter."""
    torch.set_num_threads(1)
    held, found = Held(layout), []
    for run in runs:
        parameters = held.parameters(run.start)
        optimizer = run.muon(parameters, folder)
        advance(held, parameters, optimizer, run.gradients)
        optimizer.close()
        found.append(held.differences(parameters, run.end))
    return found


@pytest.mark.parametrize(("layout", "size"), wide_but([("ep x fsdp", 4)], SIZES))
def test_steps_are_those_of_whole_matrices(
    ranks: Pool, layout: str, size: int, tmp_path: Path
) -> None:
    runs = runs_of(SIZES.index((layout, size)))
    for of_rank in ranks(size, stepped, layout=layout, runs=runs, folder=str(tmp_path)):
        for run, differences in zip(runs, of_rank, strict=True):
            worst = max(differences, key=lambda name: differences[name])
            case = (run.model, run.settings, worst, differences[worst])
            assert differences[worst] < ATOL.get(run.settings, USUAL), case


def test_a_reference_with_a_bug_is_found() -> None:
    """The negative control: experts that are orthogonalised together, and steps without look-ahead,
    are far away.
    """
    run, held = run_of("qwen3-moe", "muon"), Held("plain")
    for wrong in ({"split": {}}, {"nesterov": False}):
        parameters = held.parameters(run.start)
        advance(held, parameters, run.muon(parameters, **wrong), run.gradients)
        assert max(held.differences(parameters, run.end).values()) > 1e-3


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(
        zip(("model", "optimizer"), of_torch.get_state_dict(module, optimizer), strict=True)
    )


def saved(
    rank: int,
    world_size: int,
    *,
    layouts: list[str],
    run: Run,
    folder: str,
) -> None:
    """In a worker: half of the steps in each layout, and a checkpoint by torch's state dicts."""
    torch.set_num_threads(1)
    for layout in layouts:
        held = Held(layout)
        parameters = held.parameters(run.start)
        optimizer = run.muon(parameters, folder)
        advance(held, parameters, optimizer, run.gradients[: STEPS // 2])
        module = placements.tree(parameters)
        dcp.save(
            state_of(module, optimizer),
            checkpoint_id=f"{folder}/{layout} {world_size}",
        )
        optimizer.close()


def continued(
    rank: int, world_size: int, *, pairs: list[tuple[str, str]], run: Run, folder: str
) -> Any:
    """In a worker: the other half, for pairs of a layout and a checkpoint; the largest difference
    of each.
    """
    torch.set_num_threads(1)
    found = {}
    for layout, other in pairs:
        held = Held(layout)
        parameters = held.parameters({name: p + 1.0 for name, p in run.start.items()})
        optimizer = run.muon(parameters, folder)
        module = placements.tree(parameters)
        dcp.load(state := state_of(module, optimizer), checkpoint_id=f"{folder}/{other}")
        of_torch.set_state_dict(
            module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        advance(held, parameters, optimizer, run.gradients[STEPS // 2 :])
        optimizer.close()
        found[layout, other] = max(held.differences(parameters, run.end).values())
    return found


# Programs whose ranks hold other experts under one name give these names of their own to save them.
SAVED = [
    (layout, size)
    for layout, size in SIZES
    if not any(cut.sets for cut in itertools.chain(*LAYOUTS[layout].values()))
]
FEW = [("plain", 1), ("ep x fsdp", 4), ("fsdp x tp", 4)]


@pytest.mark.parametrize(
    ("model", "settings", "places"),
    [
        ("qwen3-moe", "normuon", FEW),
        pytest.param("llama4", "normuon", SAVED, marks=pytest.mark.wide),
        pytest.param("deepseek-v3", "disk", SAVED[::3], marks=pytest.mark.wide),
    ],
)
def test_a_checkpoint_of_each_layout_continues_in_another(
    ranks: Pool, model: str, settings: str, places: list[tuple[str, int]], tmp_path: Path
) -> None:
    given = {"run": run_of(model, settings), "folder": str(tmp_path)}
    sizes = sorted({size for _, size in places})
    for size in sizes:
        ranks(size, saved, layouts=[layout for layout, of in places if of == size], **given)
    others = [
        f"{layout} {size}"
        for layout, size in (
            *places[-1:],
            *places[:-1],
        )
    ]
    for size in sizes:
        pairs = [
            (layout, other)
            for (layout, of), other in zip(places, others, strict=True)
            if of == size
        ]
        for found in ranks(size, continued, pairs=pairs, **given):
            wrong = {pair: far for pair, far in found.items() if not far < USUAL}
            assert not wrong, wrong


STACK, DENSE = "mlp.experts.up_proj", "layers.0.weight"
SHAPES = {
    STACK: (5, 6, 7),
    DENSE: (8, 5),
    "norm.weight": (6,),
}


def faults(rank: int, world_size: int) -> Any:
    """In a worker: for each layout, differences after steps with faults, and what was skipped; see
    the test.
    """
    torch.set_num_threads(1)
    found, model = {}, support.Model({})
    for layout in ("ep x fsdp", "columns"):
        generator = torch.Generator().manual_seed(0)
        wholes = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        held, whole = Held(layout), support.Whole(model, wholes, {})
        parameters = held.parameters(wholes)
        optimizer = model.muon(parameters.items())
        skipped = list[str]()
        for step in range(5):
            gradients = {
                name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
            }
            if step == 1:
                del gradients[DENSE]
            if step == 2:
                gradients[STACK][2, 3, 3] = torch.inf
            if step == 3:
                for p in parameters.values():
                    placements.move(p)
            whole.step(gradients)
            held.give(parameters, gradients)
            given = [p for p in parameters.values() if p.grad is not None]
            memory = [weakref.ref(placements.in_watched_memory(p)) for p in given]
            optimizer.step()
            optimizer.zero_grad()
            assert not any(each() is not None for each in memory), "a gradient outlives zero_grad"
            skipped += optimizer.skipped_updates()
        found[layout] = held.differences(parameters, whole.weights), skipped
    return found


def test_a_fault_in_one_expert_concerns_that_one(ranks: Pool) -> None:
    """A gradient that is not finite or missing leaves one matrix alone; weights that have moved are
    found, and gradients are not kept.
    """
    for found in ranks(4, faults):
        for place, (differences, skipped) in found.items():
            assert max(differences.values()) < USUAL, (place, differences)
            assert set(skipped) <= {f"{STACK}[2]", DENSE}, place
