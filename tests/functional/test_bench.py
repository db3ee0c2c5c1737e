"""`python -m benchmarks.step` on two gloo ranks, DeepSpeed included: all figures are right."""

import importlib.util
import json
import sys

import pytest

from benchmarks.command import run_logged, torchrun
from megatron_muon.tools.train.processes import environment
from tests.support import cli

pytestmark = pytest.mark.timeout(300)
SMALL = cli.words("--device cpu --ranks 2 --hidden-size 64 --num-layers 1 --repeat 2")
deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="no deepspeed: pip install '.[bench]'"
)

COMPARE = """
import torch
import torch.distributed as dist
from benchmarks.peers import DeepSpeedMuon
from deepspeed.utils import safe_get_full_fp32_param

dist.init_process_group("gloo")
# an odd number, of which two are uneven: one rank owns more than the other, or rounds are padded
shapes = [(96, 32), (32, 32), (32, 128), (33, 17), (32, 32)]
generator = torch.Generator().manual_seed(1)
weights = [0.02 * torch.randn(shape, generator=generator) for shape in shapes]
gradients = [1e-3 * torch.randn(shape, generator=generator) for shape in shapes]
settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
peer = DeepSpeedMuon(weights, gradients, **settings)
matrices = [torch.nn.Parameter(weight.clone()) for weight in weights]
for matrix, gradient in zip(matrices, gradients):
    matrix.grad = gradient.clone()
reference = torch.optim.Muon(matrices, nesterov=True, adjust_lr_fn="original", **settings)
for _ in range(2):
    peer.prepare()
    peer.step()
    reference.step()
found = map(safe_get_full_fp32_param, peer.engine.module.matrices)
for start, one, expected in zip(weights, found, matrices):
    moved, off = (expected - start).norm(), (one - expected).norm()
    assert moved > 0.1 * start.norm(), (moved, start.norm())
    # Both iterate in bf16, rounded at other places: up to 0.04 was seen; a clipped step: 0.92.
    assert off < 0.1 * moved, (off, moved)
dist.destroy_process_group()
"""


def measured(tmp_path, setting):
    """The output and the figures of a benchmark of a small step."""
    command = [sys.executable, "-m", "benchmarks.step", *SMALL, *setting.split()]
    run = cli.run([*command, "--json", "figures.json"], tmp_path, seconds=240).checked()
    return run.output, json.loads((tmp_path / "figures.json").read_text("utf-8"))


def test_bench_step(tmp_path):
    setting = "--ns-dtype fp32 --team-size 1 2 --variants cautious hyperball"
    output, figures = measured(tmp_path, setting)
    assert "Optimizer step, H 64, L 1, 2 ranks, fp32" in output
    ratio = figures["ratios"]["adam_over_owner"]
    assert f"{ratio:.2f}" in output
    methods = figures["methods"]
    names = ["owner", "allgather", "adam", "team-1", "team-2", "cautious", "hyperball"]
    assert list(methods) == names
    for values in methods.values():
        assert 0 < values["min_ms"] <= values["median_ms"]
        assert values["phases_ms"]
        assert values["peak_extra_bytes"] > 0
    elements = 12 * 64 * 64
    # Each rank holds half of every matrix: all-gather brings the other half, the owner scheme as
    # much there and back.
    received = {name: values["received_bytes"] for name, values in methods.items()}
    assert received["allgather"] == elements // 2 * 4
    assert received["owner"] >= elements // 2 * 4
    assert received["adam"] == 0
    # All are small: auto forms no team. Teams of two cut each of the six blocks, and add up its
    # Gram matrix in fp32 at least twice; each time a rank receives half of it, twice.
    teams = {name: methods[name]["matrices_of_teams"] for name in ("owner", "team-1", "team-2")}
    assert teams == {"owner": {}, "team-1": {}, "team-2": {"2": 4}}
    assert received["team-2"] >= 6 * 2 * 64 * 64 * 4
    assert {"momentum", "orthogonalize", "apply"} <= methods["owner"]["phases_ms"].keys()


@deepspeed
def test_a_step_of_deepspeed_is_muons(tmp_path):
    """Compared with torch.optim.Muon. DeepSpeed clips by default: only the direction was Muon's."""
    script = tmp_path / "compare.py"
    script.write_text(COMPARE, "utf-8")
    command = torchrun(2, str(script))
    run_logged(command, tmp_path / "log", env=environment(2), what="the comparison")


@deepspeed
def test_bench_step_with_deepspeed(tmp_path):
    _, figures = measured(tmp_path, "--methods owner --peers deepspeed")
    values = figures["methods"]["deepspeed"]
    assert 0 < values["min_ms"] <= values["median_ms"]
    assert values["peak_extra_bytes"] > 0
