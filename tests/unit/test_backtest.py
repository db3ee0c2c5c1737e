"""Published steps against their simulation: docs/performance.md has what the script prints."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks import backtest
from megatron_muon.core.cost import GRAM, KERNEL

table = functools.cache(backtest.table)

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def section() -> str:
    return PAGE.read_text("utf-8").split("\n## Back-test\n")[1].split("\n## ")[0]


def test_the_page_has_what_the_script_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backtest, "table", table)
    backtest.main([])
    printed, notes = capsys.readouterr().out.rstrip().split("\n\n")
    assert [line for line in section().splitlines() if line.startswith("|")] == printed.splitlines()
    words = " ".join(section().split())
    for note in notes.splitlines():
        assert note in words


def test_one_restart_counts_what_its_authors_say() -> None:
    """6 a + 14 units of n^3 for a block of sides n and a n: gram-newton-schulz with symmetric products."""
    iteration = backtest.OneRestart(method=GRAM, products=KERNEL)
    counts, n, ratio = iteration.counts(GRAM), 1024, 4
    assert (2 * counts.gram * ratio / 2 + counts.square + counts.symmetric + 2 * counts.wide * ratio) == 6 * ratio + 14
    halved = backtest.OneRestart("quintic", 5, "medium", GRAM, backtest.SYMMETRIC)
    assert halved.flops(n, ratio * n) == (6 * ratio + 14) * n**3


def test_the_models_have_their_published_sizes() -> None:
    dense = backtest.COPIES * backtest.numel(backtest.DENSE_MATRICES)
    experts = backtest.COPIES * backtest.EXPERT * backtest.numel(backtest.EXPERT_MATRICES)
    assert dense + experts == pytest.approx(120e9, rel=0.04)  # without embeddings
    embeddings = {backtest.QWEN_1B: 151936 * 1536, backtest.LLAMA_3B: 2 * 128256 * 3072,
                  backtest.QWEN_7B: 2 * 152064 * 3584, backtest.LLAMA_8B: 2 * 128256 * 4096}  # fmt: skip
    for model, others in embeddings.items():
        assert backtest.numel(model.matrices) + others == pytest.approx(model.parameters, rel=0.005)
