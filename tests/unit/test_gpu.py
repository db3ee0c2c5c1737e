"""A GPU that exists and cannot be used is refused; only a machine without one falls back to the
CPU.
"""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import step_ranks
from megatron_muon.errors import UserError
from megatron_muon.megatron import prepare
from megatron_muon.megatron import run_device as gpu
from megatron_muon.tools.doctor import command as doctor

OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this machine look like another: device files, what NVML counts, which torch, what CUDA
    says.
    """

    def make(*, files=0, counted=-1, built="13.0", available=False, says=None):
        def init():
            if says is not None:
                raise RuntimeError(says + "\nPlease update your GPU driver.")

        for number in range(files):
            (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: counted)
        monkeypatch.setattr(torch.cuda, "init", init)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(
    ("about", "why"),
    [
        (
            {"files": 2, "says": OLD},
            r"^torch .* says: The NVIDIA driver .* too old \(found version 11040\)$",
        ),
        (
            {"counted": 8, "says": "Torch not compiled with CUDA enabled"},
            r"^torch .* says: Torch not compiled",
        ),
        ({"files": 1}, r"finds no device; see nvidia-smi$"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(machine, about, why):
    """One node with an old driver trained on its CPU over gloo, while the others waited over NCCL."""
    machine(**about)
    assert re.search(why, gpu.unusable_gpu({}))
    for settle in (
        lambda: prepare.settle_device("auto"),
        lambda: step_ranks.settle_device("auto", 1),
    ):
        with pytest.raises(
            UserError, match=r"^--device auto: torch cannot use .* GPU: .* --device cpu"
        ):
            settle()
    finding = doctor._device(0)
    assert finding.state == doctor.WRONG
    assert "torch" in finding.text


@pytest.mark.parametrize("about", [{}, {"counted": 0}, {"files": 2, "available": True}])
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


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_may_be_hidden_on_purpose(machine, hidden):
    machine(files=2, says=OLD)
    assert gpu.unusable_gpu({"CUDA_VISIBLE_DEVICES": hidden}) is None


def test_the_cpu_may_be_asked_for_beside_a_gpu(machine):
    machine(files=2, says=OLD)
    gpu.refuse_unusable_gpu("cpu")
    assert step_ranks.settle_device("cpu", 1) == torch.device("cpu")
