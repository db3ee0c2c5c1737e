"""`megatron-muon doctor --gpu --device cpu` on ranks: all checks pass; an exchange that does not
wait and trainings that differ are found.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.command import torchrun
from megatron_muon.tools.doctor import gpu_checks, step_checks
from megatron_muon.tools.doctor.gpu_checks import Context
from tests.support import cli

DOCTOR = cli.words("-m megatron_muon.cli doctor --gpu --device cpu --json report.json")


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_two_ranks_pass(tmp_path):
    command = torchrun(2, *DOCTOR)
    made = cli.run(command, tmp_path, seconds=500, cold=True).checked()
    assert "all checks pass that can run here" in made.output
    text = (tmp_path / "report.json").read_text("utf-8")
    assert str(tmp_path) not in text
    report = json.loads(text)
    assert report["where"] == "cpu, ranks: 2"
    assert report["checks"].keys() == step_checks.CHECKS.keys()
    assert {one["status"] for one in report["checks"].values()} == {"ok"}


class Dropped:
    """Work that nobody waits for."""

    def wait(self):
        """Return at once."""


def stressed(rank, world_size, *, folder):
    """In a worker: the findings of `steps` if all-to-alls are not waited for."""
    right, left = dist.all_to_all_single, []

    def all_to_all_single(*args, **options):
        left.append(right(*args, **options))
        return Dropped()

    dist.all_to_all_single = all_to_all_single
    context = Context(torch.device("cpu"), Path(folder), rank, world_size)
    try:
        step_checks._check_variant(context, "owner", {})
    finally:
        dist.all_to_all_single = right
        for work in left:
            work.wait()
    return context.wrong


def test_an_exchange_that_does_not_wait_is_found(ranks, tmp_path):
    found = ranks(2, stressed, folder=str(tmp_path))
    assert any("owner: " in text for of_rank in found for text in of_rank), found


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_trainings_that_differ_are_found(tmp_path, monkeypatch):
    """The two share the data and one rank's reference."""
    wrong = {"scaled": "--muon-extra-scale-factor 0.05", "misspelled": "--muon-momentun 0.5"}
    monkeypatch.setattr(gpu_checks, "TRAININGS", wrong)
    monkeypatch.setattr(gpu_checks, "ON_CPU", tuple(wrong))
    context = Context(torch.device("cpu"), tmp_path)
    gpu_checks.training(context)
    scaled, misspelled = context.wrong
    assert "scaled: losses beside one rank's: error " in scaled
    assert "misspelled: status 2\n" in misspelled
