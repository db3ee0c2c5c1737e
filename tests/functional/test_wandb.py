"""Weights & Biases in real runs of `megatron-muon train`, offline: what its files say, beside
TensorBoard's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_muon.tools.train.records import read_events
from tests.functional.test_metrics import documented
from tests.support import cli, offline_run

pytest.importorskip(
    "wandb", reason="needs the extra `wandb`, which the lock file leaves out: it brings 20 packages"
)
pytestmark = pytest.mark.wide

FLAGS = """
    --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --eval-interval 2
    --log-timers-to-tensorboard --timing-log-level 1 --no-barrier-with-level-1-timing
    --log-throughput --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
    --muon-metrics-interval 2 --save saves --save-interval 3 --wandb-project mine --muon-lr 0.02
    --tokenizer-type NullTokenizer --vocab-size 200
"""
OF_WANDB = {"_step", "_runtime", "_timestamp", "samples vs steps"}


def train(cwd: Path, *flags: str) -> None:
    line = "-m megatron_muon.cli train --nproc 2 --out run"
    command = [sys.executable, *line.split(), *flags]
    cli.run(command, cwd, seconds=cli.SECONDS).checked()


def test_names_and_values_are_tensorboards_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    lines = ["MODEL_ARGS:", *(f"  {flag}: true" for flag in ("--use-megatron-fsdp", "--mock-data"))]
    (tmp_path / "x.yaml").write_text("\n".join([*lines, "  --optimizer: muon"]) + "\n", "utf-8")
    model = (*cli.TINY, *FLAGS.split())
    train(tmp_path, "--config", "x.yaml", *model, "--train-iters", "3")
    train(tmp_path, "--resume", "--train-iters", "6", "--override-opt-param-scheduler")
    folder = tmp_path / "run"
    both = [offline_run.read(each) for each in sorted((folder / "wandb").glob("offline-run-*"))]
    logged = read_events(folder / "tensorboard").scalars
    texts = {name for name in logged if name.endswith(" vs samples")}
    expected = {}
    for name in set(logged) - texts:
        expected[name] = {point.step: point.value for point in logged[name]}
    some = {f"lm loss{part}" for part in ("", " validation", " validation ppl")}
    some |= {"learning-rate", "muon/learning-rate", "tokens-per-second", "optimizer-share"}
    some |= {"throughput", "mem-reserved-bytes", "muon/step_ms"}
    assert some < set(expected)
    assert documented() - set(expected) == {"mfu", "skipped-iterations", "max_attention_logit"}
    assert {name for name in set(expected) - documented() if not name.endswith("-time")} == set()
    steps = {step for _, metrics, _ in both for step in metrics["lm loss"]}
    assert [sorted(metrics["lm loss"]) for _, metrics, _ in both] == [[1, 2, 3], [4, 5, 6]]
    assert steps == set(expected["lm loss"])
    found: dict[str, dict[int, float]] = {}
    for _, metrics, _ in both:
        for name in set(metrics) - OF_WANDB:
            found.setdefault(name, {}).update(metrics[name])
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps fp32

    (config, _, first), (_, _, second) = both
    assert first == {"id": second["id"], "name": "run", "group": ""} == second
    assert config["muon_lr"] == 0.02
    assert config["config"] == str(Path("run", "config.yaml"))
