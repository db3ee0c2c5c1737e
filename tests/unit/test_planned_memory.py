"""The memory that a plan says a step takes, against the memory that the step takes on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_muon import cpu
from megatron_muon.core.layout import Layout, RowSplit, row_sharded
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.tools.plan.command import settings_of
from megatron_muon.tools.plan.estimate import HARDWARE, Group, plan_group
from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse_rank

RANKS = 3
LAYOUT = Layout(
    RANKS,
    tuple(
        row_sharded(f"layer{k}.{name}", shape, rows, split)
        for k in range(4)
        for name, shape, rows, split in (
            ("qkv", (1536, 1024), [512, 1000, 24], RowSplit(4, (256, 64, 64))),
            ("proj", (1024, 1024), [0, 24, 1000], None),
            ("fc1", (4096, 1024), [1500, 1500, 1096], RowSplit(1, (2048, 2048))),
            ("fc2", (1024, 4096), [0, 1024, 0], None),
        )
    ),
)


CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 0.1}
ADAMUON, NORMUON = (
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": method} for method in ("adamuon", "normuon")
)
FP32, LARGE = {"muon_exchange_dtype": "fp32"}, {"muon_exchange_buffer_mb": 256.0}
OFTEN = [
    {},
    {"muon_team_size": "2"},
    {**NORMUON, "muon_exchange_buffer_mb": 144.0},
]
SELDOM = [
    {**FP32, "muon_nesterov": False},
    ADAMUON,
    CAUTIOUS,
    {"muon_hyperball": True, "weight_decay": 0.0},
    {"muon_fp32_matmul_prec": "highest", "muon_ns": "gram"},
    {"muon_ns": "standard", "muon_exchange_buffer_mb": 1024.0},
    {"muon_num_ns_steps": 1},
    {**ADAMUON, "muon_team_size": "2"},
    {**ADAMUON, **CAUTIOUS},
    {**NORMUON, **CAUTIOUS, "muon_exchange_buffer_mb": 144.0},
    {**CAUTIOUS, "muon_team_size": "2"},
    {**CAUTIOUS, **FP32},
    {**ADAMUON, **FP32, **LARGE},
    {**NORMUON, **FP32, **LARGE},
]
OLDER = [
    {"muon_exchange_buffer_mb": 72.0},
    {"muon_team_size": "2", "muon_ns": "standard"},
    {"muon_ns": "gram", "muon_num_ns_steps": 2},
]


@pytest.mark.parametrize(
    ("settings", "hardware"),
    [
        *((settings, "h100-sxm") for settings in OFTEN),
        *(pytest.param(settings, "h100-sxm", marks=pytest.mark.wide) for settings in SELDOM),
        *(pytest.param(settings, "a100-sxm", marks=pytest.mark.wide) for settings in OLDER),
    ],
)
def test_a_step_takes_what_its_plan_says(settings: dict[str, Any], hardware: str) -> None:
    cpu.uninstall()
    config = MuonOptimizerConfig(
        **{"optimizer": "muon", "lr": 0.01, "muon_exchange_buffer_mb": 112.0, "muon_nesterov": True} | settings
    )
    group = Group("dense", LAYOUT)
    planned = plan_group(group, settings_of(config, HARDWARE[hardware]), HARDWARE[hardware])
    rehearsal = Rehearsal(config, [group], RANKS, HARDWARE[hardware])
    for rank in range(RANKS):
        taken = rehearse_rank(rank, rehearsal).steps[-1].extra_bytes
        assert taken <= planned.plan.buffer_bytes
        assert planned.extra[rank] == pytest.approx(taken, rel=0.1)
