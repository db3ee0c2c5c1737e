"""What `python -m tests.support.typed` types and watches; wide cases type two pages, the command alone all."""

from pathlib import Path

import pytest

from tests.support import typed
from tests.support.documented import Command


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("torchrun ... pretrain_gpt.py --config FILE", f"configs/quickstart.yaml {typed.SHORT}"),
        ("megatron-muon train --config a.yaml", f"a.yaml --  {typed.SHORT}"),
        ("megatron-muon train --config a.yaml --dry-run", "--dry-run"),
        ("megatron-muon sweep --grid lr=1,2 --seeds 3", f"lr=1 --seeds 3 --seeds 1 --  {typed.SHORT}"),
        ("megatron-muon summary runs/mine", "runs/mine"),
        ("python -m benchmarks.step --repeat 9", "--num-layers 1 --warmup 1 --repeat 1"),
        ("python -m benchmarks.train --steps 9 -- --bf16", f"--steps 2 --warmup 1 --rounds 1 -- --bf16 {typed.SMALL}"),
    ],
)
def test_only_long_commands_are_shortened(text: str, ends: str) -> None:
    assert typed.shortened(text).endswith(ends)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("true", ""),
        ("false", "status 1"),
        ("echo > runs/quickstart/run.json", "changed ['runs/quickstart/run.json']"),
        ("rm data/stdlib.bin", "changed ['data/stdlib.bin']"),
        ("touch runs/quickstart/new", "changed ['runs/quickstart/new']"),
    ],
)
def test_a_command_that_fails_or_changes_the_quickstart_is_found(text: str, says: str, tmp_path: Path) -> None:
    for name in ("runs/quickstart/run.json", "data/stdlib.bin"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("kept", "utf-8")
    wrong = typed.type_command(Command("nowhere", 1, text), tmp_path, {})
    assert says in wrong
    assert bool(wrong) == bool(says)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["README.md", "docs/offload.md"])
def test_a_page_can_be_typed_where_the_quickstart_has_run(page: str) -> None:
    assert typed.main([page]) == 0  # prints a line for each command
