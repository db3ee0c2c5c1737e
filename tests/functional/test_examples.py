"""The scripts of examples/, and benchmarks that torchrun starts, run as their first lines say."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support import cli

pytestmark = [pytest.mark.timeout(300), pytest.mark.wide]


def python(ranks: int, script: str, *flags: str) -> list[str]:
    """The command of a script, by torchrun for several ranks."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    return [sys.executable, *(torchrun if ranks > 1 else ()), str(cli.ROOT / script), *flags]


@pytest.mark.parametrize(
    ("script", "ranks", "matrices", "first", "last"),
    [
        ("own_training_loop.py", 2, 8, 4.2, 1.0),
        ("fsdp2_transformers.py", 2, 28, 5.0, 2.6),
        ("megatron_fsdp_library.py", 2, 28, 5.0, 2.8),
        ("plain_pytorch.py", 2, 12, 1.3, 0.4),
        ("plain_pytorch.py", 1, 12, 1.3, 0.4),
    ],
)
def test_examples_learn(
    script: str, ranks: int, matrices: int, first: float, last: float, tmp_path: Path
) -> None:
    """Uniform guesses would stay at 4.2 of 64 tokens, at 5.5 of bytes, at 1.4 of shapes."""
    command = python(ranks, f"examples/{script}")
    output = cli.run(command, tmp_path, cold=True).checked().output
    assert re.search(rf"^muon +{matrices} ", output, re.MULTILINE), output
    assert "warn" not in output.lower()  # there were 60 lines of them for 6 of results
    losses = [float(loss) for loss in re.findall(r"(?m)^step +\d+ +loss ([\d.]+)", output)]
    assert len(losses) == 6
    assert losses[-1] < min(last, losses[0])
    assert losses[0] < first


TRAINERS = [
    ("transformers_trainer.py", 1, [], "accelerate"),
    ("transformers_trainer.py", 2, [], "accelerate"),
    ("transformers_trainer.py", 1, ["--trl"], "trl"),
    ("transformers_trainer.py", 2, ["--trl", "--compile"], "trl"),
    ("accelerate_fsdp2.py", 1, ["--compile"], "accelerate"),
    ("accelerate_fsdp2.py", 2, [], "accelerate"),
    ("lightning_fsdp2.py", 1, [], "pytorch_lightning"),
    ("lightning_fsdp2.py", 2, ["--compile"], "pytorch_lightning"),
    ("torchtitan_container.py", 2, [], "torchtitan"),
]


def losses_after_the_checkpoint(
    script: str, ranks: int, flags: list[str], folder: Path
) -> list[str]:
    command = python(ranks, f"examples/trainers/{script}", "--folder", "run", *flags)
    output = cli.run(command, folder, cold=True).checked().output
    losses = dict(re.findall(r"(?m)^step +(\d+)  loss ([\d.]+)$", output))
    assert [int(step) for step in losses] == [*range(7, 13)], output
    return list(losses.values())


@pytest.mark.parametrize(("script", "ranks", "flags", "package"), TRAINERS)
def test_a_trainer_goes_on_to_the_last_bit(
    script: str, ranks: int, flags: list[str], package: str, tmp_path: Path
) -> None:
    """Of twelve steps, six are repeated from the trainer's own checkpoint; 5.5 is the loss of
    uniform guesses.
    """
    if find_spec(package) is None:
        pytest.skip(
            f"needs {package}; the lock file leaves trainers out, as they bring 20 packages"
        )
    through = losses_after_the_checkpoint(script, ranks, flags, tmp_path)
    assert losses_after_the_checkpoint(script, ranks, [*flags, "--resume"], tmp_path) == through
    assert float(through[-1]) < 4.5
    saved = tmp_path / "run/checkpoint-6/optimizer.pt"
    if saved.exists():  # a negative control
        state = torch.load(saved)
        for slots in state["state"].values():
            if "momentum_buffer" in slots:
                slots["momentum_buffer"].zero_()
        torch.save(state, saved)
        without = losses_after_the_checkpoint(script, ranks, [*flags, "--resume"], tmp_path)
        assert without[1:] != through[1:]


def test_the_step_on_fsdp2_beside_others(tmp_path: Path) -> None:
    """muon-fsdp2 is there where it is installed."""
    sizes = ["--hidden-size", "32", "--num-layers", "1", "--repeat", "1", "--warmup", "1"]
    run = cli.run(python(2, "benchmarks/any_model.py", *sizes), tmp_path, cold=True).checked()
    rows = dict(re.findall(r"^(\S+) +([\d,.]+) +[\d,.]+ +[\d.]+$", run.output, re.MULTILINE))
    assert {"megatron_muon", "torch.optim.Muon", "torch.optim.AdamW"} <= rows.keys()
    assert all(float(value.replace(",", "")) > 0.0 for value in rows.values())
