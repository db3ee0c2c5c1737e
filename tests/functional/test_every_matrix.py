"""Every matrix of models that people train, held by ranks in every way: ten steps are those of
whole matrices.

Gradients are those of a training by the reference (support/every_matrix.py), of which every rank
gets its part; so weights differ by the iteration's rounding alone, ATOL.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch

from tests.support import every_matrix as support
from tests.support import placements
from tests.support.every_matrix import MODELS, SETTINGS, STEPS, Run
from tests.support.placements import LAYOUTS, Held
from tests.support.pool import Pool
from tests.support.wide import wide_but

# it divides elements by their own size, so those that are nearly zero by little but rounding
ATOL = {"adamuon": 3e-5}
USUAL = 1e-6

APART = [
    layout
    for layout, cuts in LAYOUTS.items()
    if any(cut.sets for each in cuts.values() for cut in each)
]
"""Here ranks hold other experts under one name."""

Case = tuple[str, str]  # model and settings


def rounds_alike(layout: str, model: str) -> bool:
    """Whether int8 rounds as in one process: it has a scale for up to 128 columns of a rank, and
    knows experts by name and number, so no columns may be cut, and no rank may count experts of its
    own.
    """
    cuts = next(iter(LAYOUTS[layout].values()))
    by_columns = {"S1", "s1", "S-1"} & set(
        cuts[0].placements.split(),
    ) | {"S2", "S-1"} & set(cuts[1].placements.split())
    return layout == "plain" or not (by_columns or MODELS[model].transposed or layout in APART)


def cases_of(number: int, layout: str) -> list[Case]:
    """Each model once, with other settings in each layout."""
    found = []
    for place, model in enumerate(MODELS):
        settings = list(SETTINGS)[(number + place) % len(SETTINGS)]
        found.append(
            (model, "muon" if settings == "int8" and not rounds_alike(layout, model) else settings)
        )
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A file for workers with the runs of models and what they lead to, of these cases."""
    folder = tmp_path_factory.mktemp("recorded")
    numbers = itertools.count()

    def write(cases: Sequence[Case]) -> str:
        runs = {model: support.trained(model) for model, _ in cases}
        ends = {case: support.expected(*case) for case in cases}
        torch.save((runs, ends), path := folder / str(next(numbers)))
        return str(path)

    return write


def load(
    file: str,
) -> tuple[
    dict[str, Run],
    dict[Case, dict[str, torch.Tensor]],
]:
    torch.set_num_threads(1)
    found: Any = torch.load(file, weights_only=False)
    return found


def settings_of(settings: str, folder: str) -> dict[str, Any]:
    return {**SETTINGS[settings], **({"offload_dir": folder} if settings == "disk" else {})}


def stepped(
    rank: int,
    world_size: int,
    *,
    file: str,
    layout: str,
    cases: list[Case],
    folder: str,
) -> Any:
    """In a worker: for each case the largest difference of each parameter, and whether a second run
    has its bits.
    """
    (runs, ends), held, found = load(file), Held(layout), {}
    for model, settings in cases:
        bits = []
        for steps in (3, STEPS):
            parameters = held.parameters(runs[model].start)
            optimizer = MODELS[model].muon(parameters.items(), **settings_of(settings, folder))
            for step, gradients in enumerate(runs[model].gradients[:steps], 1):
                held.give(parameters, gradients)
                optimizer.step()
                if step == 3:
                    bits.append(placements.bits(parameters))
            optimizer.close()
        found[model, settings] = (
            held.differences(parameters, ends[model, settings]),
            bits[0] == bits[1],
        )
    return found


SIZES = [(layout, size) for layout, sizes in LAYOUTS.items() for size in sizes]


@pytest.mark.parametrize(("layout", "size"), wide_but([("ep x fsdp", 4)], SIZES))
def test_ten_steps_are_those_of_whole_matrices(
    ranks: Pool, recorded: Any, layout: str, size: int, tmp_path: Path
) -> None:
    cases = cases_of(SIZES.index((layout, size)), layout)
    answers = ranks(
        size, stepped, file=recorded(cases), layout=layout, cases=cases, folder=str(tmp_path)
    )
    for case, found in itertools.product(cases, answers):
        differences, same_bits = found[case]
        worst = max(differences, key=lambda name: differences[name])
        assert differences[worst] < ATOL.get(case[1], USUAL), (case, worst, differences[worst])
        assert same_bits, case


def test_a_reference_with_a_bug_is_found(recorded: Any) -> None:
    """The negative control: experts that are orthogonalised together, and steps without look-ahead,
    are far away.
    """
    run, model = support.trained("qwen3-moe"), MODELS["qwen3-moe"]
    held = Held("plain")
    for wrong in ({"split": {}}, {"nesterov": False}):
        parameters = held.parameters(run.start)
        optimizer = model.muon(parameters.items(), **wrong)
        for gradients in run.gradients:
            held.give(parameters, gradients)
            optimizer.step()
        assert max(held.differences(parameters, run.end).values()) > 1e-3


def saved(
    rank: int,
    world_size: int,
    *,
    file: str,
    layouts: list[str],
    case: Case,
    folder: str,
) -> None:
    """In a worker: half of the steps in each layout, and a checkpoint by torch's state dicts."""
    (runs, _), (model, settings) = load(file), case
    for layout in layouts:
        held = Held(layout)
        parameters = held.parameters(runs[model].start)
        optimizer = MODELS[model].muon(parameters.items(), **settings_of(settings, folder))
        for gradients in runs[model].gradients[: STEPS // 2]:
            held.give(parameters, gradients)
            optimizer.step()
        module = placements.tree(parameters)
        dcp.save(state_of(module, optimizer), checkpoint_id=f"{folder}/{layout} {world_size}")
        optimizer.close()


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(
        zip(("model", "optimizer"), of_torch.get_state_dict(module, optimizer), strict=True)
    )


def continued(
    rank: int,
    world_size: int,
    *,
    file: str,
    pairs: list[tuple[str, str]],
    case: Case,
    folder: str,
) -> Any:
    """In a worker: the other half, for pairs of a layout and a checkpoint; the largest difference
    of each.
    """
    (runs, ends), (model, settings), found = load(file), case, {}
    for layout, other in pairs:
        held = Held(layout)
        parameters = held.parameters(
            {name: torch.zeros_like(p) + 1e-3 for name, p in runs[model].start.items()}
        )
        optimizer = MODELS[model].muon(parameters.items(), **settings_of(settings, folder))
        module = placements.tree(parameters)
        dcp.load(state := state_of(module, optimizer), checkpoint_id=f"{folder}/{other}")
        of_torch.set_state_dict(
            module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for gradients in runs[model].gradients[STEPS // 2 :]:
            held.give(parameters, gradients)
            optimizer.step()
        optimizer.close()
        found[layout, other] = max(held.differences(parameters, ends[case]).values())
    return found


# Programs whose ranks hold other experts under one name give these names of their own to save them.
SAVED = {
    size: [layout for layout, of in SIZES if of == size and layout not in APART]
    for size in (1, 2, 3, 4)
}
FEW = {1: ["plain"], 4: ["ep x fsdp", "fsdp x tp"]}


@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        (("qwen3-moe", "normuon"), FEW),
        *(
            pytest.param(case, SAVED, marks=pytest.mark.wide)
            for case in (
                ("llama4", "normuon"),
                ("vit", "adamuon"),
                ("gpt2", "disk"),
            )
        ),
        pytest.param(
            ("deepseek-v3", "int8"),
            {1: ["plain"], 3: ["fsdp"], 4: ["ep x fsdp", "hsdp"]},
            marks=pytest.mark.wide,
        ),
    ],
)
def test_checkpoints_of_each_layout_continue_in_each_other(
    ranks: Pool,
    recorded: Any,
    case: Case,
    layouts: dict[int, list[str]],
    tmp_path: Path,
) -> None:
    """Of many layouts each goes to and comes from some, which are others in each case."""
    given = {"file": recorded([case]), "case": case, "folder": str(tmp_path)}
    for size, several in layouts.items():
        ranks(size, saved, layouts=several, **given)
    places = [(layout, size) for size, several in layouts.items() for layout in several]
    few, first = len(places) <= 6, list(SETTINGS).index(case[1])
    for size in layouts:
        pairs = [
            (layout, "{} {}".format(*places[(number + step) % len(places)]))
            for number, (layout, of) in enumerate(places)
            for step in (range(len(places)) if few else (3 * first + 1, 5 * first + 2))
            if of == size
        ]
        for found in ranks(size, continued, pairs=pairs, **given):
            atol = ATOL.get(case[1], USUAL)
            wrong = {pair: far for pair, far in found.items() if not far < atol}
            assert not wrong, wrong


STACK, DENSE = "mlp.experts.up_proj", "layers.0.weight"
SHAPES = {STACK: (5, 6, 7), DENSE: (8, 5), "norm.weight": (6,)}


def faults(rank: int, world_size: int, *, layouts: list[str]) -> Any:
    """In a worker: for each layout, differences after steps with faults, and what was skipped; see
    the test.
    """
    torch.set_num_threads(1)
    found, model = {}, support.Model({})
    for layout, transposed in itertools.product(layouts, (False, True)):
        model = support.Model({}, transposed=("up_proj",) if transposed else ())
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
        found[layout, transposed] = held.differences(parameters, whole.weights), skipped
    return found


@pytest.mark.parametrize(
    "layouts", wide_but([["ep x fsdp", "columns"]], [["ep x fsdp", "columns"], SAVED[4]])
)
def test_a_fault_in_one_expert_concerns_that_one(ranks: Pool, layouts: list[str]) -> None:
    """A gradient that is not finite or missing leaves one matrix alone; weights that have moved are
    found, and gradients are not kept.
    """
    for found in ranks(4, faults, layouts=layouts):
        for place, (differences, skipped) in found.items():
            assert max(differences.values()) < USUAL, (place, differences)
            assert set(skipped) <= {f"{STACK}[2]", DENSE}, place
