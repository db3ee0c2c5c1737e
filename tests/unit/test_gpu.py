"""A GPU that cannot be used is refused; only a machine without one falls back to the CPU."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import step_ranks
from megatron_muon.errors import UserError
from megatron_muon.megatron import prepare
from megatron_muon.megatron import run_device as gpu
from megatron_muon.tools.doctor import doctor_command

OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this machine look like another: device files, NVML's count, CUDA's error."""

    def make(*, files=0, counted=-1, available=False, error=None):
        def init():
            if error is not None:
                raise RuntimeError(error + "\nPlease update your GPU driver.")

        for name in ("nvidiactl", *(f"nvidia{number}" for number in range(files))):
            (tmp_path / name).touch()
        monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: counted)
        monkeypatch.setattr(torch.cuda, "init", init)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"files": 2, "error": OLD}, r"^torch .* says: .* too old \(found version 11040\)$"),
        ({"files": 1}, r"finds no device; see nvidia-smi$"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(machine, about, why):
    """One node with an old driver trained on its CPU over gloo; the others waited over NCCL."""
    machine(**about)
    assert re.search(why, gpu.unusable_gpu({}))
    text = r"^--device auto: torch cannot use .* GPU: .* --device cpu"
    for settle in (prepare.settle_device, lambda wanted: step_ranks.settle_device(wanted, 1)):
        with pytest.raises(UserError, match=text):
            settle("auto")
    finding = doctor_command._device(0)
    assert finding.state == doctor_command.WRONG
    assert "torch" in finding.text


@pytest.mark.parametrize("about", [{}, {"files": 2, "available": True}])
def test_no_gpu_and_a_good_one_are_no_reason(machine, about):
    machine(**about)
    assert gpu.unusable_gpu({}) is None


def test_fewer_gpus_than_ranks_are_refused(machine, monkeypatch):
    """It was a traceback of each rank beyond them: "invalid device ordinal"."""
    machine(files=4, available=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert gpu.settle_device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert gpu.settle_device("auto", on_paper=True) == "cuda"
    with pytest.raises(UserError, match=r"this machine has 4; use --nproc-per-node 4$"):
        gpu.settle_device("auto")


def test_a_gpu_may_be_hidden_or_the_cpu_requested(machine):
    machine(files=2, error=OLD)
    assert gpu.unusable_gpu({"CUDA_VISIBLE_DEVICES": "-1"}) is None
    gpu.refuse_unusable_gpu("cpu")
    assert step_ranks.settle_device("cpu", 1) == torch.device("cpu")
