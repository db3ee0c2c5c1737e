"""Momentum on the host or on disk: the updates are those without, to the last bit, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.test_checkpoints import FULL, SWIGLU, differences, saved
from tests.support import cli
from tests.support.case import Case
from tests.support.cases import MOE, TP
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

pytestmark = pytest.mark.usefixtures("every_way")

STEPS = 5
BUFFER_MB = 0.04  # ten pages: what a rank holds goes through in several parts

LAYOUTS = {
    "optim": (2, Case(strategy="optim")),
    "optim_grads": (2, Case(strategy="optim_grads")),
    "optim_grads_params": (2, Case(strategy="optim_grads_params")),
    "allgather": (2, Case(optimizer={"muon_exchange": "allgather"})),
    "without nesterov": (2, Case(optimizer={"muon_nesterov": False, "decoupled_weight_decay": False})),
    "shared replicas": (2, Case(strategy="no_shard", optimizer={"muon_share_replicated": True})),
    "TP 2 x DP 2": (4, TP),
    "EP 2 x DP 2": (4, MOE.but(expert_parallel=2)),
    "HSDP 2 x DP 2": (4, Case(instances=2, layers=1)),
}


def train(rank: int, world_size: int, *, case: Case, settings: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """In a worker: this rank's weights and momentum after `STEPS` steps with each of the settings."""
    from tests.support.model import Trainer

    results = []
    for setting in settings:
        trainer = Trainer(case.but(optimizer={**case.optimizer, **setting}), steps=STEPS)
        for _ in range(STEPS):
            trainer.step()
        bits = {name: p._local_tensor.detach().clone() for name, p in trainer.parameters.items()}
        names = {parameter: name for name, parameter in trainer.parameters.items()}
        for member in trainer.optimizer.chained_optimizers:
            if hasattr(member.optimizer, "momentum_state"):
                for parameter, momentum in member.optimizer.momentum_state().items():
                    bits[f"{names[parameter]}:momentum"] = momentum._local_tensor.clone()
        results.append(bits)
        assert trainer.optimizer.offload_failure is None
    return results


def offloads(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """None, cpu, nvme, and half of it on nvme."""
    folder.mkdir(exist_ok=True)
    nvme = {"muon_offload": "nvme", "muon_offload_dir": str(folder), "muon_offload_buffer_mb": BUFFER_MB}
    settings = [{}, {"muon_offload": "cpu"}, nvme, {**nvme, "muon_offload_fraction": 0.5}]
    return [{**setting, **more} for setting in settings]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("layout", wide_but(["without nesterov"], LAYOUTS))
def test_updates_are_the_same_wherever_momentum_lives(ranks: Pool, tmp_path: Path, layout: str) -> None:
    world_size, case = LAYOUTS[layout]
    for of_rank in ranks(world_size, train, case=case, settings=offloads(tmp_path / "momentum")):
        for offloaded in of_rank[1:]:
            assert differing(of_rank[0], offloaded) == []
    assert list((tmp_path / "momentum").iterdir()) == []  # cleaned up


@pytest.mark.wide
def test_rounded_momentum_is_the_same_wherever_it_lives_and_however_it_is_cut(ranks: Pool, tmp_path: Path) -> None:
    case = Case(strategy="optim_grads_params", layers=1)
    for dtype in ("bf16", "int8"):
        settings = offloads(tmp_path / "momentum", muon_momentum_dtype=dtype)
        of_ranks = ranks(2, train, case=case, settings=settings)
        for of_rank in of_ranks:
            for offloaded in of_rank[1:]:
                assert differing(of_rank[0], offloaded) == []
        alone = ranks(1, train, case=case, settings=settings[:1])[0][0]
        for name, whole in alone.items():
            parts = [of_rank[0][name] for of_rank in of_ranks]
            # The iteration's products of blocks in other batches round differently in fp32: five steps of that, and
            # where it moves a value over the edge of two stored ones, one spacing of the storage format.
            torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-3, msg=f"{dtype} {name}")


def training_flags(tmp_path: Path, *, dtype: str = "fp32") -> dict[str, tuple[str, ...]]:
    (tmp_path / "momentum").mkdir(exist_ok=True)
    common = ("--muon-momentum-dtype", dtype)
    buffer = ("--muon-offload-buffer-mb", str(BUFFER_MB))
    return {
        "none": common,
        "cpu": (*common, "--muon-offload", "cpu"),
        "nvme": (*common, *buffer, "--muon-offload", "nvme", "--muon-offload-dir", str(tmp_path / "momentum")),
    }


@pytest.fixture
def training(ranks: Pool, tmp_path: Path) -> Trainings:
    corpus = cli.make_corpus(tmp_path)
    steps = ("--train-iters", "4", "--save-interval", "2")
    return Trainings(ranks, tmp_path, (*cli.TINY, *corpus, *steps, *FULL, *SWIGLU), batch=4)


CHAIN = [("none", "nvme"), ("nvme", "cpu")]


@pytest.mark.parametrize("moves", wide_but([], [CHAIN, [("nvme", "none")]]))
def test_checkpoints_are_the_same_wherever_momentum_lives(
    training: Trainings, tmp_path: Path, every_way: str, moves: list[tuple[str, str]]
) -> None:
    """Saved with one setting, resumed with another, and saved again: nothing differs."""
    flags = training_flags(tmp_path)
    run = training(*flags["none"], "--save", "none").checked()
    assert "optimizer state: momentum fp32: device 0." in run.output
    expected = {iteration: saved(training, "none", iteration) for iteration in (2, 4)}
    run = training(*flags["nvme"], "--save", "nvme").checked()
    staged = every_way == "two_memories"  # through the memory of a GPU
    assert ("device 0.00 MB, host 0." in run.output) is not staged
    for iteration in (2, 4):
        assert differences(saved(training, "nvme", iteration), expected[iteration]) == []
    for before, after in moves:
        name = f"{before} to {after}"
        run = training(*flags[after], "--load", before, "--ckpt-step", "2", "--save", name).checked()
        assert [iteration.number for iteration in run.iterations] == [3, 4]
        assert differences(saved(training, name, 4), expected[4]) == [], name


def test_rounded_momentum_resumes_as_if_uninterrupted(training: Trainings, tmp_path: Path) -> None:
    """bf16 keeps what it reads; the steps that rounding depends on go on from the checkpoint."""
    flags = training_flags(tmp_path, dtype="bf16")
    training(*flags["nvme"], "--save", "nvme").checked()
    training(*flags["none"], "--load", "nvme", "--ckpt-step", "2", "--save", "none").checked()
    expected = saved(training, "nvme", 4)
    assert differences(saved(training, "none", 4), expected) == []
    momentum = [value for name, value in expected.items() if name.endswith("momentum_buffer")]
    assert momentum
    assert all(value.dtype == torch.float32 for value in momentum)
    assert all(torch.equal(value, value.bfloat16().float()) for value in momentum)


def anonymous_bytes() -> int:
    """This process's own memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("/proc/self/status has no RssAnon")


def grow(rank: int, world_size: int, *, offload: str, folder: str) -> dict[str, int]:
    """In a worker: what keeping momentum, and some steps of changing it, adds to this process's own memory."""
    from benchmarks.layouts import gpt_layout
    from megatron_muon.offload.run import OffloadRun

    layout = gpt_layout(world_size, 384, 14)
    directory = folder if offload == "nvme" else None
    torch.zeros(2**20).add_(1.0)  # what a first operation loads
    before = anonymous_bytes()
    run = OffloadRun(offload, "fp32", directory=directory, buffer_mb=6)
    shards = layout.held(rank)
    store = run.make_store(layout, rank, torch.device("cpu"))
    for _ in range(3):
        for _, borrowed in store.borrow(range(len(shards))):
            for momentum in borrowed:
                momentum.add_(1.0)
        store.end_step()
    grown = anonymous_bytes() - before
    assert all(torch.equal(store.read(i), torch.full((s.rows, s.cols), 3.0)) for i, s in enumerate(shards))
    figures = {"grown": grown, "staging": store.staging_bytes, **store.bytes}
    run.close()
    return figures


def test_momentum_on_disk_takes_the_staging_of_memory_and_no_more(ranks: Pool, tmp_path: Path) -> None:
    """The process's own memory as the system counts it, and the count of tensors."""
    none, nvme = (ranks(1, grow, offload=where, folder=str(tmp_path))[0] for where in ("none", "nvme"))
    momentum = none["device"]
    assert momentum == nvme["disk"] >= 10 * nvme["staging"]
    assert nvme["device"] == 0
    assert nvme["host"] == nvme["staging"]
    assert none["grown"] > 0.9 * momentum
    # Beside the slots: two threads, and the bookkeeping of 56 shards.
    assert nvme["grown"] < nvme["staging"] + 0.02 * momentum, (none, nvme)
