"""All state of the optimizers off the device: the training is the one without, to the last bit, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_checkpoints import FULL, SWIGLU, differences, saved, warnings
from tests.functional.test_offload import BUFFER_MB, differing
from tests.support import cases, cli
from tests.support.case import Case
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

STEPS = 5

LAYOUTS = {
    "optim": (2, Case(strategy="optim", bf16=True)),
    "optim_grads": (2, Case(strategy="optim_grads", bf16=True)),
    "optim_grads_params": (2, Case(strategy="optim_grads_params", bf16=True)),
    "one rank": (1, Case(strategy="optim_grads_params", bf16=True)),
    "four ranks, of which some hold no rows": (4, Case(ffn=47, bf16=True)),
    "fp32": (2, Case(strategy="optim_grads_params")),
    "frozen": (2, Case(bf16=True, frozen=("embedding",))),
    "cautious decay": (2, Case(bf16=True, optimizer={"muon_cautious_weight_decay": True})),
    "lion": (2, Case(bf16=True, optimizer={"muon_scalar_optimizer": "lion"})),
    "HSDP with outer optim": (4, Case(instances=2, outer="optim", layers=1, bf16=True, overlap=True)),
    **{name: (size, case.but(bf16=True)) for name, (size, case) in cases.LAYOUTS.items()},
}


def train(
    rank: int, world_size: int, *, case: Case, settings: list[dict[str, Any]], share_counters: bool = False
) -> list[dict[str, torch.Tensor]]:
    """In a worker: the bits of weights and state that this rank has after `STEPS` steps with each of the settings.

    The model's own weights are among them. The fourth step is skipped, because gradients are not finite.
    `share_counters` puts a bug in: pieces of a parameter count its steps together.
    """
    from megatron_muon.megatron import main_weights
    from tests.support.case import gradient_of
    from tests.support.model import Trainer

    def poisoned(name: str, shape: Any, step: int) -> torch.Tensor:
        return gradient_of(name, shape, step) * float("nan")

    if share_counters:
        main_weights._copied = lambda value: value
    results = []
    for setting in settings:
        trainer = Trainer(case.but(optimizer={**case.optimizer, **setting}), steps=STEPS)
        skipped = []
        for step in range(STEPS):
            updated, _, _ = trainer.step(poisoned if step == 3 else gradient_of)
            skipped += [step] * (not updated)
        assert skipped == [3]
        results.append(bits_of(trainer))
        assert trainer.optimizer.offload_failure is None
    return results


def bits_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards of main weights, of what the model computes with, and of all state."""
    bits = {}
    for group in trainer._buffer.parameter_groups:
        for item, original in enumerate(group.params):
            shard = group.model_weight_buffer.get_item(item, only_shard=True)
            bits[f"{trainer._buffer.param_to_name[original]}:model"] = shard.clone()
    with trainer.optimizer.main_weights_at_hand():
        bits |= {name: p._local_tensor.detach().clone() for name, p in trainer.parameters.items()}
    names = {parameter: name for name, parameter in trainer.parameters.items()}
    state = {name: dict(slots) for name, slots in trainer.states().items()}
    for member in trainer.optimizer.chained_optimizers:
        if hasattr(member.optimizer, "momentum_state"):
            for parameter, momentum in member.optimizer.momentum_state().items():
                state.setdefault(names[parameter], {})["momentum_buffer"] = momentum
    for scalars in trainer.optimizer._scalar_state.values():
        for parameter, slots in scalars.state().items():
            state.setdefault(names[parameter], {}).update(slots)
    for name, slots in state.items():
        bits |= {f"{name}:{slot}": getattr(value, "_local_tensor", value).clone() for slot, value in slots.items()}
    return bits


def offloads(folder: Path) -> list[dict[str, Any]]:
    """None; all on cpu, on nvme, and half of it on nvme."""
    folder.mkdir(exist_ok=True)
    everything = {"muon_offload_state": "all", "muon_offload_buffer_mb": BUFFER_MB}
    nvme = {**everything, "muon_offload": "nvme", "muon_offload_dir": str(folder)}
    return [{}, {**everything, "muon_offload": "cpu"}, nvme, {**nvme, "muon_offload_fraction": 0.5}]


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("layout", wide_but(["optim_grads_params"], LAYOUTS))
def test_the_training_is_the_same_wherever_all_state_lives(ranks: Pool, tmp_path: Path, layout: str) -> None:
    world_size, case = LAYOUTS[layout]
    for of_rank in ranks(world_size, train, case=case, settings=offloads(tmp_path / "state")):
        for offloaded in of_rank[1:]:
            assert differing(of_rank[0], offloaded) == []
    assert list((tmp_path / "state").iterdir()) == []  # cleaned up


@pytest.mark.wide
def test_the_comparison_can_fail(ranks: Pool, tmp_path: Path) -> None:
    """Story: others applied the step counters of offloaded state twice."""
    world_size, case = LAYOUTS["optim_grads_params"]
    for of_rank in ranks(world_size, train, case=case, settings=offloads(tmp_path / "state"), share_counters=True):
        wrong = differing(of_rank[0], of_rank[2])
        assert any(name.endswith("weight:step") for name in wrong)
        assert not any("layers" in name for name in wrong), "Muon counts no steps"


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture
def training(ranks: Pool, tmp_path: Path) -> Trainings:
    """Four steps of twelve sequences, saved every two, with an evaluation in between, bf16."""
    corpus = cli.make_corpus(tmp_path)
    steps = ("--train-iters", "4", "--save-interval", "2", "--eval-interval", "3", "--eval-iters", "1", "--bf16")
    (tmp_path / "state").mkdir()
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *FULL, *SWIGLU, *steps), batch=12)


FLAGS = {
    "none": (),
    "momentum": ("--muon-offload", "cpu"),
    "cpu": ("--muon-offload", "cpu", "--muon-offload-state", "all"),
    "nvme": (
        *("--muon-offload", "nvme", "--muon-offload-dir", "state", "--muon-offload-state", "all"),
        *("--muon-offload-buffer-mb", str(BUFFER_MB)),
    ),
}
MOVES = [("none", "nvme"), ("nvme", "none"), ("momentum", "cpu"), ("nvme", "momentum")]


@pytest.mark.usefixtures("two_memories_too")
@pytest.mark.parametrize(("before", "after"), wide_but([("none", "nvme")], MOVES))
def test_checkpoints_are_the_same_wherever_all_state_lives(training: Trainings, before: str, after: str) -> None:
    """Saved with one setting, resumed with another, and saved again: nothing differs."""
    evaluated = training(*FLAGS[before], "--save", "before").checked().validation_losses
    assert len(evaluated) == 2
    run = training(*FLAGS[after], "--load", "before", "--ckpt-step", "2", "--save", "after").checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4]
    assert run.validation_losses == evaluated
    assert warnings(run) == []
    expected = saved(training, "before", 4)
    assert differences(saved(training, "before", 2), expected), "the comparison can fail"
    assert differences(saved(training, "after", 4), expected) == []
    assert list((training.folder / "state").iterdir()) == []


@pytest.mark.usefixtures("two_memories_too")
@pytest.mark.wide
@pytest.mark.parametrize("ranks_after", [1, 4])
def test_all_state_is_cut_anew_for_other_ranks(training: Trainings, ranks_after: int) -> None:
    """Both with it and without it, a run on other ranks goes on from the same checkpoint to the same one."""
    training(*FLAGS["nvme"], "--save", "two").checked()
    for where in ("none", "nvme"):
        flags = (*FLAGS[where], "--load", "two", "--ckpt-step", "2", "--save", f"other {where}")
        assert warnings(training(*flags, ranks=ranks_after).checked()) == []
    assert differences(saved(training, "other nvme", 4), saved(training, "other none", 4)) == []


@pytest.mark.usefixtures("two_memories_too")
@pytest.mark.wide
def test_weights_alone_and_state_of_another_optimizer(training: Trainings) -> None:
    """What a checkpoint does not give starts afresh as without it: no state of Adam's checkpoint, none at all."""
    training("--optimizer", "adam", "--save", "adam").checked()
    for flags in (("--no-load-optim",), ("--finetune",), ("--override-opt-param-scheduler",)):
        found = []
        for where in ("none", "nvme"):
            name = f"{flags[0]} {where}"
            training(*FLAGS[where], "--load", "adam", "--ckpt-step", "2", "--save", name, *flags).checked()
            found.append(saved(training, name, 4))
        assert differences(*found) == []
