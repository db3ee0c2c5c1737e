"""Checkpoints that survive: save and go on, on the same layout and on any other, with the same or
another optimizer.

The runs are whole training runs in the pool's workers; what they saved is read back entry by entry.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint import content, folders
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

SWIGLU = cli.words("--swiglu --normalization RMSNorm --disable-bias-linear")
EXPERTS = (
    *SWIGLU,
    *cli.words("--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"),
)
ADAM = ("--optimizer", "adam", "--use-megatron-fsdp")
OVERLAP = cli.words("--overlap-grad-reduce --overlap-param-gather")
DROPOUT = cli.words("--attention-dropout 0.1 --hidden-dropout 0.1")
EXACT = ("--muon-fp32-matmul-prec", "highest")
OF_THE_RUN = ("args", ".is_expert_parallel")
"""Ends of entries that tell how the checkpoint was written."""

DIVISIBLE = cli.words("--hidden-size 44 --ffn-hidden-size 104 --num-attention-heads 4")


def strategy(name: str) -> tuple[str, ...]:
    return ("--data-parallel-sharding-strategy", name)


FULL = (*cli.MUON, *EXACT, *strategy("optim_grads_params"))


@pytest.fixture
def training(ranks: Pool, corpus: tuple[str, ...], tmp_path: Path) -> Trainings:
    """Six steps of twelve sequences, which 1, 2, 3 and 4 ranks can share, saved every two."""
    steps = cli.words("--train-iters 6 --save-interval 2")
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *steps), batch=12)


def saved(training: Trainings, name: str, iteration: int = 6) -> dict[str, Any]:
    """Every entry of a checkpoint, but for the arguments of the run that wrote it."""
    folder = folders.iteration_folder(training.folder / name, iteration)
    assert folders.problems(folder) == []
    entries = content.read_entries(folder)
    names = [entry for entry in entries if not entry.endswith(OF_THE_RUN)]
    consumed = arguments(training, name, iteration).consumed_train_samples
    return {**content.read(folder, names), "consumed": consumed}


def arguments(training: Trainings, name: str, iteration: int = 6) -> Any:
    folder = folders.iteration_folder(training.folder / name, iteration)
    return content.read(folder, ["args"])["args"]


def differences(
    found: dict[str, Any],
    expected: dict[str, Any],
) -> list[str]:
    """Names of entries that are not the same to the last bit, or not in both."""
    names = found.keys() ^ expected.keys()
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        same = (
            torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)
        )
        names |= set() if same else {name}
    return sorted(names)


def warnings(run: cli.Run) -> list[str]:
    return [line for line in run.output.splitlines() if line.startswith("megatron-muon: warning: ")]


LION = (*FULL, "--muon-scalar-optimizer", "lion")
QKV_BIAS = ("--swiglu", "--add-qkv-bias")
FC1_IS_SCALAR = ("--muon-exclude", "linear_fc1")
MODELS = {
    "swiglu under optim, in bf16": (*cli.MUON, *strategy("optim"), *SWIGLU, "--bf16"),
    "swiglu under no_shard": (*cli.MUON, *EXACT, *strategy("no_shard"), *SWIGLU),
    "experts": (*FULL, *EXPERTS),
    "adam": (*ADAM, *strategy("optim_grads_params"), *SWIGLU),
    "hyperball": (*FULL, *SWIGLU, *cli.HYPERBALL, *OVERLAP),
    "lion, swiglu, biases": (*LION, *QKV_BIAS),
    "lion, experts' fc1": (*LION, *EXPERTS, *FC1_IS_SCALAR),
    "adam, swiglu's fc1": (*FULL, *QKV_BIAS, *FC1_IS_SCALAR),
}
LAYERS = 3
MATRICES = {"adam": 0, "experts": LAYERS * (2 + 1 + 4 * 3)}
"""Momenta of a model, halves apart, where they are not those of a SwiGLU."""


@pytest.mark.parametrize("model", wide_but(["experts"], MODELS))
def test_a_resumed_run_is_the_uninterrupted_one(training: Trainings, model: str) -> None:
    """Weights, momentum, moments and counters of Adam, schedule, random numbers (dropout is on),
    data position.

    Story: a handler that knew exp_avg alone lost momentum; under no_shard it asked for an attribute
    that is not there; AdamW's ranks saved different keys and never came back; Lion with SwiGLU,
    whose biases or whole projections it has, ended in KeyError 'exp_avg_sq' at the first save.
    """
    flags = (*MODELS[model], *DROPOUT)
    training(*flags, "--save", "whole").checked()
    assert folders.iterations(training.folder / "whole") == [2, 4, 6]
    assert folders.latest(training.folder / "whole") == 6
    run = training(*flags, *cli.words("--load whole --ckpt-step 2 --save resumed")).checked()
    assert [iteration.number for iteration in run.iterations] == [3, 4, 5, 6]
    assert warnings(run) == []
    expected = saved(training, "whole")
    assert differences(saved(training, "resumed"), expected) == []

    scalar = frozenset({"exp_avg"} if "lion" in flags else {"exp_avg", "exp_avg_sq", "step"})
    slots = content.optimizer_slots(expected)
    assert set(slots.values()) == {scalar} | (
        {frozenset({"momentum_buffer"})} if model != "adam" else set()
    )
    of_fc1 = {name: kept for name, kept in slots.items() if "fc1" in name}
    assert all(name.endswith(("_w", "_v")) == ("--swiglu" in flags) for name in of_fc1)
    if "linear_fc1" in flags:
        assert set(of_fc1.values()) == {scalar}
    else:
        momentum = [name for name in expected if name.endswith("momentum_buffer")]
        assert len(momentum) == MATRICES.get(model, LAYERS * 5)
    state = [
        name for name in expected if name.endswith(("momentum_buffer", "exp_avg", "exp_avg_sq"))
    ]
    assert all(expected[name].dtype == torch.float32 and expected[name].any() for name in state)
    assert values_of(expected) == ({6.0} if "step" in scalar else set())
    assert expected["consumed"] == 6 * 12
    # the comparison can fail
    assert set(state) <= set(differences(saved(training, "whole", 4), expected))


def layout(sharding: str, *flags: str) -> tuple[str, ...]:
    return (*cli.MUON, *strategy(sharding), *flags)


CHAIN = [
    (3, layout("optim")),
    (2, layout("no_shard")),
    (4, layout("optim_grads_params", "--muon-exchange", "allgather")),
]
"""Ranks and flags; test_checkpoint_layouts.py has layouts of more dimensions."""


@pytest.mark.wide
def test_any_strategy_loads_what_any_other_saved(training: Trainings) -> None:
    """A chain of layouts, each loading what the one before saved: nothing changes by a bit."""
    training(*FULL, *SWIGLU, "--save", "whole").checked()
    expected = saved(training, "whole")
    before = "whole"
    for ranks, of_layout in CHAIN:
        name = f"of {ranks} ranks"
        # The last iteration is done: a run that loads it saves again, since 4 does not divide 6,
        # and ends.
        again = ("--load", before, "--save", name, "--save-interval", "4")
        run = training(*EXACT, *SWIGLU, *of_layout, *again, ranks=ranks).checked()
        assert warnings(run) == [], name
        assert run.iterations == []
        assert differences(saved(training, name), expected) == [], name
        before = name


def remove_entries(folder: Path, *parts: str) -> int:
    """Take the entries with all these parts in their name out of a checkpoint's index; their
    number.
    """
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    gone = [name for name in metadata.state_dict_metadata if all(part in name for part in parts)]
    for name in gone:
        del metadata.state_dict_metadata[name]
    metadata.storage_data = {
        key: value for key, value in metadata.storage_data.items() if key.fqn not in gone
    }
    index.write_bytes(pickle.dumps(metadata))
    (folder / folders.CHECKSUMS).unlink(missing_ok=True)  # as of a run that wrote none
    return len(gone)


def rates_of(entries: dict[str, Any]) -> set[float]:
    names = [name for name in entries if "linear_proj" in name and name.endswith(".max_lr")]
    return {entries[name] for name in names}


def values_of(entries: dict[str, Any]) -> set[float]:
    return {float(value) for name, value in entries.items() if name.endswith(".step")}


@pytest.mark.wide
def test_another_optimizer_starts_afresh_and_missing_state_is_an_error(training: Trainings) -> None:
    """Adam's checkpoint into Muon and Muon's into Adam: weights and what both keep are loaded, the
    rest is counted.

    Story: with --no-strict-fsdp-dtensor-load upstream passes over missing momentum in silence.
    """
    flags = (*EXACT, *SWIGLU, "--save-interval", "4")
    adam, muon = (*ADAM, *strategy("optim_grads")), (*FULL, "--muon-lr", "0.003")
    training(*adam, *flags, "--save", "adam", ranks=3).checked()
    expected = saved(training, "adam")

    run = training(*muon, *flags, *cli.words("--load adam --save muon")).checked()
    (warning,) = warnings(run)
    assert (
        "15 entries of optimizer state start at zero, because another optimizer or layout wrote"
        " this checkpoint" in warning
    )
    assert "decoder.layers.0.mlp.linear_fc1.weight_v.momentum_buffer" in warning
    found = saved(training, "muon")
    momentum = {name for name in found if name.endswith("momentum_buffer")}
    assert len(momentum) == 15
    assert not any(found[name].any() for name in momentum)
    settings = "optimizer.param_to_group_meta."
    both = [name for name in found if name in expected and not name.startswith(settings)]
    assert sum(name.startswith("model.") for name in both) == len(content.weight_names(found))
    assert any(name.endswith("exp_avg") for name in both)
    assert [name for name in differences(found, expected) if name in both] == []
    assert rates_of(found) == {0.003}  # Muon's own, not Adam's for these matrices

    run = training(*adam, *flags, *cli.words("--load muon"), ranks=3).checked()
    (warning,) = warnings(run)
    assert "45 entries of optimizer state start at zero" in warning

    run = training(*muon, *flags, *cli.words("--load muon --muon-lr 0.004"))
    assert run.returncode == 2
    assert "max_lr 0.003 for decoder." in run.output
    assert (
        "this run 0.004 (--lr, --min-lr, --muon-lr, --muon-min-lr); use"
        " --override-opt-param-scheduler" in run.output
    )
    override = cli.words(
        "--load muon --muon-lr 0.004 --override-opt-param-scheduler --save overridden"
    )
    training(*muon, *flags, *override).checked()
    overridden = saved(training, "overridden")
    assert rates_of(overridden) == {0.004}

    broken = folders.iteration_folder(training.folder / "muon", 6)
    assert remove_entries(broken, "momentum_buffer", "layers.1.", "fc2") == 1
    run = training(*muon, *flags, "--load", "muon")
    assert run.returncode == 2
    assert "lacks 1 entries of optimizer state: " in run.output
    assert "--muon-allow-missing-state" in run.output
    momentum_flag = ("--muon-momentum", "0.8")
    again = cli.words("--load muon --save allowed --muon-allow-missing-state")
    run = training(*muon, *flags, *momentum_flag, *again).checked()
    assert "using the checkpoint's momentum 0.9; ignoring --muon-momentum 0.8" in warnings(run)[1]
    assert "1 entries of optimizer state start at zero, because it lacks them" in warnings(run)[0]
    assert differences(saved(training, "allowed"), found) == []  # it was zero before, too

    assert remove_entries(broken, "model.", "final_layernorm") == 1
    run = training(*muon, *flags, "--load", "muon", "--muon-allow-missing-state")
    assert run.returncode == 2
    assert "is of another model: decoder.final_layernorm.weight is not in it" in run.output
    run = training(*muon, *flags, "--train-iters=9", "--load", "adam")
    assert run.returncode == 2
    assert "use --override-opt-param-scheduler for this run's schedule" in run.output


@pytest.mark.wide
def test_weights_are_loaded_without_state(training: Trainings) -> None:
    """In bf16 that ended in a NotImplementedError."""
    flags = (*FULL, "--bf16")
    whole = training(*flags, "--save", "bf16").checked()
    run = training(*flags, *cli.words("--load bf16 --ckpt-step 2 --no-load-optim")).checked()
    assert run.losses[0] == pytest.approx(whole.losses[2], abs=1e-5)
