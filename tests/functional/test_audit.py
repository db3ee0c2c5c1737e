"""Audits find the faults that others shipped, name where they are, and end a run that asks for it.

That they find nothing in correct runs is held by the table of parity, whose cases are audited in
every step (`test_exact_updates.py -m ''`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_muon
from megatron_muon.errors import AuditError
from tests.functional.test_megatron_matrix_optimizers import of
from tests.support.case import Case, batches
from tests.support.cases import MOE, but
from tests.support.model import Trainer
from tests.support.pool import Pool
from tests.support.wide import wide_but

ROOT = Path(__file__).resolve().parents[2]
EVERY_STEP = {"muon_audit_interval": 1}
PLAIN = but(Case(), **EVERY_STEP, weight_decay=0.1)
HALF = but(PLAIN, muon_fp32_matmul_prec="medium")
REPLICAS = PLAIN.but(instances=2)
CORRECT = {
    "fp32": PLAIN,
    "bf16": HALF,
    "replicas": REPLICAS,
    "a class that gets gradients in bf16": of("soap", but(PLAIN, muon_exchange_dtype="bf16")),
}


def another_owners_update() -> Any:
    """Blocks of one shape get each other's updates."""
    from megatron_muon.core.engine import Engine

    apply = Engine._apply_method

    def swapped(self: Any, wave: Any) -> None:
        apply(self, wave)
        for stack in wave.stacks:
            stack.blocks.copy_(stack.blocks.flip(0))

    return mock.patch.object(Engine, "_apply_method", swapped)


def a_lost_row() -> Any:
    """A row, or column of a tall block, does not arrive at its owner."""
    from megatron_muon.core.passes import Passes

    fill = Passes.fill

    def without_a_row(self: Any, wave: Any) -> None:
        fill(self, wave)
        for stack in wave.stacks:
            stack.blocks[:, 1].zero_()

    return mock.patch.object(Passes, "fill", without_a_row)


def momentum_twice() -> Any:
    """Momentum takes each gradient twice."""
    from megatron_muon.core.passes import Passes

    advance = Passes.advance

    def twice(self: Any, wave: Any) -> None:
        advance(self, wave)
        advance(self, wave)

    return mock.patch.object(Passes, "advance", twice)


def half_a_block() -> Any:
    """The halves of a block are orthogonalized separately."""
    from megatron_muon.core.methods import newton_schulz

    iterate = newton_schulz.iterate

    def halves(x: torch.Tensor, *others: Any) -> torch.Tensor:
        parts = x.clone().chunk(2, dim=-1)
        return torch.cat([iterate(part.contiguous(), *others).clone() for part in parts], -1)

    return mock.patch.object(newton_schulz, "iterate", halves)


def decay_twice() -> Any:
    """Weights decay twice."""
    from megatron_muon.core.rows import Rows

    with_weights = Rows.with_weights

    def decayed(self: Any, chunk: Any) -> Any:
        for part in with_weights(self, chunk):
            for group, _, weights in part.by_group():
                torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            yield part

    return mock.patch.object(Rows, "with_weights", decayed)


def a_bit_of_a_replica() -> Any:
    """One replica has another last bit."""
    from megatron_muon.core.rows import Rows

    end_step = Rows.end_step

    def flipped(self: Any) -> None:
        end_step(self)
        if dist.get_rank() == dist.get_world_size() - 1:
            for index in self.held:
                rows = self.kept_weights.read(index).view(-1)
                rows[:1].view(torch.int32).add_(1)

    return mock.patch.object(Rows, "end_step", flipped)


def a_second_moment_twice() -> Any:
    """AdaMuon's second moments are twice as large before a step."""
    from megatron_muon.core.rules.second_moments import AdaMuon

    after = AdaMuon.after

    def doubled(self: Any, part: Any) -> None:
        for index in part.indices:
            self.moments[index].mul_(2.0)
        after(self, part)

    return mock.patch.object(AdaMuon, "after", doubled)


def clipped_to_nothing() -> Any:
    """Clipping makes gradients vanish."""
    from megatron_muon.fsdp.part import Part

    step = Part.step

    def vanished(self: Any, groups: Any) -> None:
        for each in self._with_rows:
            each.parameter.grad.mul_(1e-38).mul_(1e-10)
        step(self, groups)

    return mock.patch.object(Part, "step", vanished)


FAULTS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "another owner's update": (another_owners_update, 2, r"update differs by .* in rows \d+"),
    "a lost row": (a_lost_row, 2, r"update differs by .* in rows \d+ to \d+ of rank \d"),
    "momentum twice": (momentum_twice, 2, r"momentum differs by .* in rows 0 to \d+ of rank 0"),
    "half a block": (half_a_block, 2, r"update differs by"),
    "decay twice": (decay_twice, 2, r"weights decay by 0\.2 instead of 0\.1"),
    "a bit of a replica": (a_bit_of_a_replica, 4, r"ranks \d and \d, replicas, differ"),
    "clipped to nothing": (clipped_to_nothing, 2, r"all gradients are zero"),
}


def faults_of(rank: int, world_size: int, *, fault: str, case: Case) -> Any:
    """In a worker: what audits of one pass over the matrices find, by matrix."""
    trainer = Trainer(case)
    muon = trainer.optimizer
    count = len(muon._audits[0]._held.layout.matrices)
    found = []
    with FAULTS[fault][0]() if fault else mock.patch.dict({}):
        for batch in batches(count):
            trainer.train(batch)
            found += muon.audit_faults
    return found, count


@pytest.mark.parametrize("fault", wide_but(["a lost row", "decay twice"], FAULTS))
def test_a_fault_is_found_within_a_pass_over_the_matrices(ranks: Pool, fault: str) -> None:
    _, world_size, text = FAULTS[fault]
    case = REPLICAS if world_size == 4 else PLAIN
    everyone = ranks(world_size, faults_of, fault=fault, case=case)
    (found, _), *others = everyone
    assert all(each[0] == found for each in others), "ranks do not agree"
    assert any(re.search(text, line) for line in found), found


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["another owner's update", "a lost row", "half a block"])
def test_faults_are_found_in_bf16_too(ranks: Pool, fault: str) -> None:
    found, _ = ranks(2, faults_of, fault=fault, case=HALF)[0]
    assert any("update differs by" in line for line in found), found


@pytest.mark.wide
def test_ranks_of_a_fault_are_those_of_the_world(ranks: Pool) -> None:
    """The groups of experts are ranks 0 and 2, and 1 and 3."""
    case = but(MOE.but(expert_parallel=2), **EVERY_STEP)
    found, _ = ranks(4, faults_of, fault="momentum twice", case=case)[0]
    of_experts = [line for line in found if ".experts." in line]
    assert any("of rank 3" in line for line in of_experts), found


@pytest.mark.parametrize("kind", wide_but(["replicas"], CORRECT))
def test_nothing_is_found_in_a_correct_run(ranks: Pool, kind: str) -> None:
    case = CORRECT[kind]
    for found, count in ranks(4 if case.instances > 1 else 2, faults_of, fault="", case=case):
        assert found == []
        assert count >= 8


def test_an_optimizer_of_any_model_raises() -> None:
    """By default there is a warning."""
    torch.manual_seed(0)
    for action in ("warn", "stop"):
        weight = torch.nn.Parameter(torch.randn(12, 20))
        optimizer = megatron_muon.Muon([("layers.0.weight", weight)], audit_action=action)
        weight.grad = torch.randn(12, 20)
        with half_a_block():
            if action == "warn":
                optimizer.step()
                continue
            with pytest.raises(AuditError, match=r"layers\.0\.weight \(12 x 20\): update differs"):
                optimizer.step()


def test_audits_take_the_next_matrix_and_wait_for_a_learning_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a warm-up's first step no weight moves, so a wrong update would not be seen."""
    named = [(f"layers.{n}.weight", torch.nn.Parameter(torch.randn(12, 20))) for n in range(3)]
    optimizer = megatron_muon.Muon(named, audit_interval=4)
    audited = []
    for step in range(1, 14):
        optimizer.param_groups[0]["lr"] = 0.0 if step in (1, 2, 8) else 0.01
        for _, weight in named:
            weight.grad = torch.randn(12, 20)
        optimizer.step()
        shown = capsys.readouterr().out
        audited += re.findall(r"audit of step (\d+): layers\.(\d)\.weight .*exact, (.*)", shown)
    expected = [("3", "0"), ("4", "1"), ("8", "2"), ("12", "0")]
    assert [(step, layer) for step, layer, _ in audited] == expected
    assert "update not compared, as the learning rate is 0" in audited[2][2]
    assert all("update within" in text for step, _, text in audited if step != "8")


def audits_of(capsys: pytest.CaptureFixture[str], weight: Any, grads: Any, **given: Any) -> Any:
    """Lines of audits of a weight with these gradients, one for each step, and the optimizer."""
    parameter = torch.nn.Parameter(weight)
    named = [(given.pop("name", "layers.0.weight"), parameter)]
    optimizer = megatron_muon.Muon(named, audit_interval=1, **given)
    for step, gradient in enumerate(grads, 1):
        if not step % 2:
            optimizer.param_groups[0]["lr"] = 0.01
        parameter.grad = gradient.to(weight.dtype)
        optimizer.step()
    return capsys.readouterr().out.splitlines()[-len(grads) :], optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounding_of_weights_is_no_fault(capsys: Any, dtype: torch.dtype) -> None:
    """A small rate leaves most weights of bf16 as they are, with gradients of rank one most."""
    torch.manual_seed(0)
    weight = torch.randn(128, 256).to(dtype)
    grads = [torch.randn(128, 1) @ torch.randn(1, 256) for _ in range(3)]
    lines, _ = audits_of(capsys, weight, grads, lr=1e-5, fp32_matmul_prec="highest")
    assert all("momentum exact, update within " in line for line in lines), lines


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("rank", [1, 64])
def test_adamuon_of_rounding_is_no_fault(capsys: Any, precision: str, rank: int) -> None:
    """Its first updates are nothing but signs, also of elements that are rounding."""
    torch.manual_seed(1)
    grads = [torch.randn(256, rank) @ torch.randn(rank, 128) for _ in range(2)]
    given = {"moment2_method": "adamuon", "fp32_matmul_prec": precision}
    lines, _ = audits_of(capsys, torch.randn(256, 128), grads, **given)
    assert all("update within " in line for line in lines), lines
    if rank > 1:
        with half_a_block():
            (*_, line), _ = audits_of(capsys, torch.randn(256, 128), grads, **given)
        assert "update differs" in line
    if precision == "highest":
        with a_second_moment_twice():
            (*_, line), _ = audits_of(capsys, torch.randn(256, 128), grads, **given)
        assert "update differs" in line


def test_torchs_newer_precision_switch_is_left_as_it_is(capsys: Any) -> None:
    """torch refuses to read its older switch beside it, as emerging-optimizers does."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        (line,), _ = audits_of(capsys, torch.randn(12, 20), [torch.randn(12, 20)])
        assert "update within " in line
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def test_rounding_of_a_few_weights_is_not_taken_for_decay(capsys: Any) -> None:
    torch.manual_seed(0)
    grads = list(torch.randn(20, 1, 2))
    given = {"weight_decay": 0.0, "matrices": ["*"]}
    lines, _ = audits_of(capsys, torch.randn(1, 2), grads, **given)
    assert all("update within " in line for line in lines), lines


@pytest.mark.parametrize("shape", [(12, 20), (3, 12, 20)])
def test_gradients_may_be_zero_before_weights_move_and_in_stacks(capsys: Any, shape: Any) -> None:
    """Warm-ups begin with 0, and the layers above may too; experts may have no tokens."""
    grads = [torch.zeros(shape)] * 2
    stacks = ["*"] if len(shape) > 2 else []
    lines, optimizer = audits_of(capsys, torch.randn(shape), grads, lr=0.0, stacks=stacks)
    assert "audit of step 2: " in lines[-1]
    assert "warning" not in lines[-1]
    optimizer.step()
    is_fault = "warning" in capsys.readouterr().out
    assert is_fault == (len(shape) == 2)


def test_an_error_of_a_comparison_is_a_warning_and_nothing_is_kept(capsys: Any) -> None:
    from megatron_muon.fsdp.whole_step import WholeStep

    with mock.patch.object(WholeStep, "_step", side_effect=ValueError("bad")):
        (line,), optimizer = audits_of(capsys, torch.randn(12, 20), [torch.randn(12, 20)])
    assert line.startswith("megatron-muon: warning: ")
    assert line.endswith("update not checked: ValueError('bad')")
    (part,) = optimizer.parts
    assert part.audit.faults == []
    assert not vars(part.audit).keys() & {"_subject", "_before"}


@contextmanager
def a_bit_per_step(steps: int) -> Any:
    """Nothing is wrong before these steps."""
    from megatron_muon.core.methods import newton_schulz

    iterate, calls = newton_schulz.iterate, []

    def late(x: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(x)
        made = iterate(x, *others)
        return made.mul_(2.0) if len(calls) > steps else made

    with mock.patch.object(newton_schulz, "iterate", late):
        yield


RUN = """
from tests.functional.test_audit import a_bit_per_step
from megatron_muon.megatron.launch import run
with a_bit_per_step(12):
    run()
"""


def test_a_run_saves_and_ends(tmp_path: Path) -> None:
    """Its status is a failure's, the event names the matrix, and the checkpoint resumes."""
    events = tmp_path / "events"
    save = tmp_path / "save"
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "MEGATRON_MUON_REPORTS": str(events),
        "PYTHONPATH": str(ROOT),
    }
    model = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
    data = "--max-position-embeddings 32 --mock-data --tokenizer-type NullTokenizer"
    sizes = "--vocab-size 256 --micro-batch-size 2 --train-iters 30 --eval-iters 0 --lr 0.01"
    flags = f"{model} {data} {sizes} --save-interval 100 --optimizer muon --use-megatron-fsdp"
    audit = "--muon-audit-interval 1 --muon-audit-action stop"
    command = [sys.executable, "-c", RUN, *f"{flags} {audit} --save {save}".split()]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    reported = [json.loads(line) for line in events.read_text("utf-8").splitlines()]
    (fault,) = [event for event in reported if event["event"] == "audit"]
    assert "decoder.layers.0." in fault["fault"]
    assert fault["fault"] in done.stderr
    latest = int((save / "latest_checkpointed_iteration.txt").read_text("utf-8"))
    assert 1 < latest == fault["step"] < 30
