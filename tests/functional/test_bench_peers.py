"""Other projects as `python -m benchmarks.step --peers` measures them: a step is Muon's, and all figures are there."""

import importlib.util
import json
import sys

import pytest

from benchmarks.command import run_logged, torchrun
from megatron_muon.tools.train.processes import environment
from tests.support import cli


def peer(name: str, module: str):
    missing = importlib.util.find_spec(module) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"no {module}: pip install '.[bench]'"))


PEERS = [peer("muon-fsdp2", "muon_fsdp2"), peer("deepspeed", "deepspeed")]
pytestmark = pytest.mark.timeout(300)

COMPARE = """
import torch
import torch.distributed as dist
from megatron_muon.core.probe import PhaseTimer

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shapes = [(96, 32), (32, 32), (32, 128)]  # an odd number: one rank owns more than the other, or rounds are padded
shapes += UNEVEN
generator = torch.Generator().manual_seed(1)
weights = [0.02 * torch.randn(shape, generator=generator) for shape in shapes]
gradients = [1e-3 * torch.randn(shape, generator=generator) for shape in shapes]
settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
MAKE
matrices = [torch.nn.Parameter(weight.clone()) for weight in weights]
for matrix, gradient in zip(matrices, gradients):
    matrix.grad = gradient.clone()
reference = torch.optim.Muon(matrices, nesterov=True, adjust_lr_fn="original", **settings)
for _ in range(2):
    peer.prepare()
    timer = PhaseTimer(torch.device("cpu"))
    patches = peer.attach(timer)
    peer.step()
    patches.undo()
    reference.step()
    assert timer.bytes_received == received or (received is None and timer.bytes_received > 0), timer.bytes_received
for start, found, expected in zip(weights, found_in(peer), matrices):
    moved, off = (expected - start).norm(), (found - expected).norm()
    assert moved > 0.1 * start.norm(), (moved, start.norm())
    # Both iterate in bf16, rounding at other places: up to 0.04 was seen. A step that was clipped was off by 0.92.
    assert off < 0.1 * moved, (off, moved)
dist.destroy_process_group()
"""

MAKE = {
    "muon-fsdp2": """
from benchmarks.fsdp2 import Fsdp2Muon

peer = Fsdp2Muon(weights, [gradient.chunk(ranks)[rank] for gradient in gradients], **settings)
# Half of each matrix in fp32: the owner receives rows, the other receives the update's.
received = 4 * sum(weight.numel() for weight in weights) // 2
found_in = lambda peer: [matrix.full_tensor() for matrix in peer.matrices]
""",
    "deepspeed": """
from benchmarks.peers import DeepSpeedMuon
from deepspeed.utils import safe_get_full_fp32_param

peer, received = DeepSpeedMuon(weights, gradients, ns_method="standard", **settings), None
found_in = lambda peer: map(safe_get_full_fp32_param, peer._engine.module.matrices)
""",
}


@pytest.mark.parametrize("name", PEERS)
def test_peers_step_is_muons(tmp_path, name):
    """Compared with torch.optim.Muon on whole matrices. DeepSpeed clips by default: only the direction was Muon's."""
    script = tmp_path / "compare.py"
    uneven = "[(33, 17), (32, 32)]" if name == "deepspeed" else "[]"
    script.write_text(COMPARE.replace("MAKE", MAKE[name]).replace("UNEVEN", uneven), "utf-8")
    run_logged(torchrun(2, str(script)), tmp_path / "log", env=environment(2), what="the comparison")


@pytest.mark.parametrize("name", PEERS)
def test_bench_step_with_peers(tmp_path, name):
    peers = [name, "deepspeed-gram"] if name == "deepspeed" else [name]
    command = [sys.executable, "-m", "benchmarks.step", "--ranks", "2", "--hidden-size", "64", "--num-layers", "1"]
    setting = ["--repeat", "2", "--device", "cpu", "--methods", "owner", "--peers", *peers]
    run = cli.run([*command, *setting, "--json", "figures.json"], tmp_path, seconds=240).checked()
    assert f"Newton-Schulz of {name} in bfloat16" in run.output
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    methods = figures["methods"]
    assert list(methods) == ["owner", *peers]
    for each in peers:
        values = methods[each]
        assert len(values["times_ms"]) == 2
        assert 0 < values["min_ms"] <= values["median_ms"]
        assert {"gather_wait", "orthogonalize", "scatter_wait", "apply"} <= set(values["phases_ms"])
        assert values["peak_extra_bytes"] > 0
        ratio = values["median_ms"] / methods["owner"]["median_ms"]
        assert figures["ratios"][f"{each}_over_owner"] == pytest.approx(ratio)
        # fp32. Of DeepSpeed twice the other half of 12 H^2 elements and, of two rounds of two matrices, one of 4 H^2.
        elements = 2 * (6 + 4 + 4) if name == "deepspeed" else 12 // 2
        assert values["exchange_bytes_per_rank"] == elements * 64 * 64 * 4
