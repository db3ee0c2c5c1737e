"""`megatron-muon plan` plans what a run does: for the same config and ranks both name the same digest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_muon import cli as command
from megatron_muon.errors import ExitStatus
from tests.support import cli
from tests.support.pool import Pool
from tests.support.training import Trainings
from tests.support.wide import wide_but

MODEL = {
    "--num-layers": "3",
    "--hidden-size": "48",
    "--ffn-hidden-size": "100",
    "--num-attention-heads": "4",
    "--swiglu": "true",
    "--disable-bias-linear": "true",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "257",
    "--micro-batch-size": "1",
    "--global-batch-size": "12",
    "--train-iters": "1",
    "--eval-iters": "0",
    "--lr": "0.01",
    "--split": "90,10,0",
    "--optimizer": "muon",
    "--use-megatron-fsdp": "true",
}
EXPERTS = {"--num-experts": "4", "--moe-router-topk": "2", "--moe-router-load-balancing-type": "none"}
TP2 = {"--tensor-model-parallel-size": "2"}
LAYOUTS = {
    "optim": (2, {"--data-parallel-sharding-strategy": "optim"}),
    "optim_grads": (3, {"--data-parallel-sharding-strategy": "optim_grads"}),
    "optim_grads_params": (4, {}),
    "tp2 dp2": (4, TP2),
    "tp2 dp2 blockwise": (4, {**TP2, "--muon-tp-mode": "blockwise"}),
    "experts ep2": (2, {**EXPERTS, "--expert-model-parallel-size": "2", "--moe-grouped-gemm": "true"}),
    "optim, a bias, untied": (
        4,
        {
            **{"--data-parallel-sharding-strategy": "optim", "--disable-bias-linear": "false", "--bf16": "true"},
            **{"--untie-embeddings-and-output-weights": "true", "--overlap-grad-reduce": "true"},
        },
    ),
    "predicted tokens": (3, {"--position-embedding-type": "rope", "--mtp-num-layers": "1"}),
    "dense experts tp2": (4, {**EXPERTS, **TP2, "--sequence-parallel": "true", "--expert-tensor-parallel-size": "2"}),
    "steps by matrix": (3, {"--muon-ns-steps-for": "[linear_fc*=3, linear_qkv=8]"}),
    "hsdp": (4, {"--num-distributed-optimizer-instances": "2"}),
}


@pytest.mark.parametrize("name", wide_but(["tp2 dp2", "experts ep2", "hsdp"], LAYOUTS))
def test_a_plan_has_the_digest_of_the_run(
    ranks: Pool, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans differed from runs: they counted another iteration's cost, and a tied embedding has a bucket of its own."""
    world_size, flags = LAYOUTS[name]
    config = tmp_path / "run.yaml"
    lines = [f"  {flag}: {value}\n" for flag, value in {**MODEL, **flags}.items()]
    config.write_text("MODEL_ARGS:\n" + "".join(lines), "utf-8")
    (tmp_path / "corpus").mkdir()
    corpus = cli.make_corpus(tmp_path / "corpus")
    run = Trainings(ranks, tmp_path, ("--config", str(config), *corpus))(ranks=world_size).checked()
    (digest,) = set(re.findall(r"megatron-muon: plan ([0-9a-f-]+)", run.output))

    planned = tmp_path / "plan.json"
    line = ["plan", "--config", str(config), "--world-size", str(world_size), "--hardware", "cpu-2core"]
    assert command.main([*line, "--json", str(planned)]) == ExitStatus.OK
    assert json.loads(planned.read_text("utf-8"))["digest"] == digest
    assert f"digest {digest}" in capsys.readouterr().out
    assert len(digest.split("-")) == 1 + name.startswith("experts ep")
