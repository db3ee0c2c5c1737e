"""`megatron-muon plan`: the shipped models at every size, a captured layout, and what users get wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon import cli
from megatron_muon.core import newton_schulz
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import DENSE, HALVES, KERNEL, Iteration, Products
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import make_plan
from megatron_muon.megatron.flags import arguments
from megatron_muon.megatron.layout_file import dump_layout, write_layout
from megatron_muon.tools.plan import command as plan_command
from megatron_muon.tools.plan.estimate import HARDWARE, plan_group

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def planned(tmp_path: Path, *argv: object) -> dict[str, Any]:
    target = tmp_path / "plan.json"
    assert cli.main(["plan", *map(str, argv), "--json", str(target)]) == 0
    read: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return read


def config(tmp_path: Path, **changes: str | None) -> Path:
    """The quickstart with flags changed, added or (None) left out."""
    flags = {
        "num-layers": "2",
        "hidden-size": "64",
        "num-attention-heads": "4",
        "swiglu": "true",
        "disable-bias-linear": "true",
        "seq-length": "32",
        "max-position-embeddings": "32",
        "vocab-size": "257",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    path = tmp_path / "run.yaml"
    lines = [f"  --{name}: {value}" for name, value in flags.items() if value is not None]
    path.write_text("\n".join(["MODEL_ARGS:", *lines]) + "\n", "utf-8")
    return path


def message(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main(["plan", *map(str, argv)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("name", "world_size", "matrices", "parameters", "is_even"),
    [
        ("llama3-8b", 16, 32 * 4, 32 * 218_103_808, True),
        ("llama3-8b", 1024, 32 * 4, 32 * 218_103_808, False),
        pytest.param("llama3-8b", 4096, 32 * 4, 32 * 218_103_808, False, marks=pytest.mark.wide),
        ("llama3-70b", 64, 80 * 4, 80 * 855_638_016, True),
        ("moe-large", 128, 48 * (64 * 2 + 5), None, True),
        pytest.param("moe-large", 4096, 48 * (64 * 2 + 5), None, False, marks=pytest.mark.wide),
    ],
)
def test_the_shipped_models_are_planned(
    tmp_path: Path, name: str, world_size: int, matrices: int, parameters: int | None, is_even: bool
) -> None:
    figures = planned(tmp_path, "--config", CONFIGS / f"{name}.yaml", "--world-size", world_size)
    assert figures["matrices"] == matrices
    assert parameters is None or figures["parameters"] == parameters
    assert (figures["ns_load"]["max_over_mean"] <= 1.05) is is_even
    assert figures["extra_bytes_max"] <= figures["buffer_bytes"]
    assert figures["extra_bytes_max"] > 0
    assert 0 < figures["estimated_ms"]["ns"] <= figures["estimated_ms"]["step"]
    for group in figures["groups"]:
        assert group["ns_load"]["max_over_mean"] >= group["ns_load"]["least_possible"] * (1 - 1e-9)
        assert group["exchange_bytes"]["max_per_rank"] < group["exchange_bytes"]["allgather_per_rank"]


def test_a_shipped_model_takes_no_more_than_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Teams cut what does not fit whole; a number that is too small is an error, and the one that it names works."""
    run = ("--config", CONFIGS / "llama3-8b.yaml", "--world-size", 64)
    usual, tight = planned(tmp_path, *run), planned(tmp_path, *run, "--buffer-mb", 512)
    assert usual["buffer_bytes"] > 2**30
    assert usual["matrices_of_teams"] == {}
    assert tight["matrices_of_teams"]
    assert tight["extra_bytes_max"] <= tight["buffer_bytes"] == 2**29
    capsys.readouterr()
    found = re.search(r"needs ([0-9.]+); give at least that", message(capsys, *run, "--buffer-mb", 64))
    assert found
    assert planned(tmp_path, *run, "--buffer-mb", found[1])["extra_bytes_max"] <= float(found[1]) * 2**20


def test_the_page_leads_with_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and time first; groups, parts and assumptions, which hid them, behind a flag."""
    experts = {"num_experts": "4", "expert_model_parallel_size": "2", "moe_router_load_balancing_type": "none"}
    path = config(tmp_path, **experts, global_batch_size="8")
    figures = planned(tmp_path, "--config", path, "--world-size", 8)
    assert [(group["name"], group["ranks"]) for group in figures["groups"]] == [("dense", 8), ("experts", 4)]
    shown = capsys.readouterr().out
    headings = ["memory of a GPU", "with Muon it fits: a GPU has 74.5 GiB", "a step of 256 tokens", "step, overlapped"]
    assert sorted(headings, key=shown.index) == headings
    assert f"digest {figures['digest']}" in shown
    more = ("dense, 8 ranks", "experts, 4 ranks", "a rank in all", "received by all-gather", "forward and backward",
            "model_flops", "NVIDIA H100 data sheet")  # fmt: skip
    assert not [text for text in more if text in shown]
    planned(tmp_path, "--config", path, "--world-size", 8, "--details")
    shown = capsys.readouterr().out
    assert not [text for text in more if text not in shown]


def test_a_captured_layout(tmp_path: Path) -> None:
    layout = Layout(2, tuple(row_sharded(f"w{index}", (64, 32), [40, 24]) for index in range(8)))
    write_layout(tmp_path / "layout.json", layout)
    figures = planned(tmp_path, "--layout", tmp_path / "layout.json", "--hardware", "cpu-2core")
    assert figures["matrices"] == 8
    assert figures["ns_load"]["max_over_mean"] == 1.0
    # Each rank owns 4 matrices: it receives the other's rows of those, and its own update rows of the others.
    assert figures["exchange_bytes"]["max_per_rank"] == 4 * (24 + 40) * 32 * 2
    assert figures["exchange_bytes"]["allgather_per_rank"] == 8 * 40 * 32 * 2


def test_a_captured_layout_knows_its_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks 0, 8, 16 and 24 of a run were planned as four neighbours, with teams that a run cannot have."""
    layout = Layout(4, tuple(row_sharded(f"e{index}", (4096, 1024), [1024] * 4) for index in range(2)))
    dump_layout(tmp_path / "layout.json", layout, [0, 8, 16, 24], is_expert=True)
    path = tmp_path / "layout.experts.json"
    said = message(capsys, "--layout", path, "--team-size", 2)
    assert "--team-size 2 is more than the ranks of a node" in said
    assert planned(tmp_path, "--layout", path, "--team-size", 2, "--node-ranks", 16)["matrices_of_teams"] == {"2": 2}


def test_groups_with_several_plans_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, num_experts="6", expert_model_parallel_size="3", moe_router_load_balancing_type="none")
    figures = planned(tmp_path, "--config", path, "--world-size", 12, "--node-ranks", 4, "--details")
    assert [group["plans"] for group in figures["groups"]] == [1, 3]
    assert figures["node_ranks"] == 4
    assert "experts: 3 plans" in " ".join(capsys.readouterr().out.split())


def test_a_model_and_its_captured_layout_plan_alike(tmp_path: Path) -> None:
    ours = planned(tmp_path, "--config", QUICKSTART, "--world-size", 4)
    (dense,) = plan_command.read_config(QUICKSTART, 4, HARDWARE["h100-sxm"]).groups
    write_layout(tmp_path / "layout.json", dense.layout)
    theirs = planned(tmp_path, "--layout", tmp_path / "layout.json")
    for key in ("matrices", "ns_load", "exchange_bytes", "extra_bytes_max", "waves", "estimated_ms"):
        assert ours[key] == theirs[key]


def test_settings_come_from_the_line_then_the_file(tmp_path: Path) -> None:
    path = config(
        tmp_path, muon_fp32_matmul_prec="highest", muon_exchange_buffer_mb="1", muon_ns="gram", muon_team_size="2"
    )
    figures = planned(tmp_path, "--config", path, "--world-size", 2)
    names = ("buffer_mb", "exchange_dtype", "team_size", "ns", "ns_dtype", "ns_steps")
    assert figures["settings"] == dict(zip(names, (1.0, "fp32", "2", "gram", "fp32", 5), strict=True))
    figures = planned(tmp_path, "--config", path, "--world-size", 2, "--ns", "standard", "--ns-dtype", "bf16",
                      "--buffer-mb", 64, "--exchange-dtype", "fp32", "--team-size", "auto")  # fmt: skip
    assert figures["settings"] == dict(zip(names, (64.0, "fp32", "auto", "standard", "bf16", 5), strict=True))


EXPERTS = {"num_experts": "4", "expert_model_parallel_size": "4", "moe_router_load_balancing_type": "none"}


def test_team_sizes_that_a_plan_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, ranks, size, largest in (({}, 1, 2, 1), (EXPERTS, 4, 8, 4)):
        said = message(capsys, "--config", config(tmp_path, **changes), "--world-size", ranks, "--team-size", size)
        assert f"--team-size {size} is more than the ranks of a node that share these matrices" in said
        assert said.endswith(f"; use auto, or {largest}\n")
    path = config(tmp_path, **EXPERTS)  # an expert's group of one rank has nothing to share, in a run too
    assert planned(tmp_path, "--config", path, "--world-size", 4, "--team-size", 2)["matrices_of_teams"]


def test_what_one_group_cannot_have_others_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks share an expert at 8; that was an error."""
    figures = planned(tmp_path, "--config", config(tmp_path, **EXPERTS), "--world-size", 8, "--team-size", 4)
    dense, expert = figures["groups"]
    assert list(dense["matrices_of_teams"]) == ["4"]
    assert not expert["matrices_of_teams"]
    (said,) = figures["unmet"]
    assert said.endswith("1 is used for expert matrices")
    assert "team-size 4 " in said
    assert said in capsys.readouterr().out


def test_errors_name_the_flag_that_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They named the run's flag, which the command does not have."""
    for flag, of_run, value in (
        ("--buffer-mb", "--muon-exchange-buffer-mb", "0.125"),
        ("--team-size", "--muon-team-size", "8"),
    ):
        said = message(capsys, "--config", config(tmp_path), "--world-size", 2, flag, value)
        assert f"error: {flag} {value} " in said
        key = of_run.removeprefix("--").replace("-", "_")
        said = message(capsys, "--config", config(tmp_path, **{key: value}), "--world-size", 2)
        assert f"error: {of_run} {value} " in said


def test_normuon_is_planned_without_teams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its owners need whole updates, so training forms no teams."""
    wide = {"num_layers": "1", "ffn_hidden_size": "65536", "hidden_size": "2048", "optimizer": "adaptive_muon"}
    path = config(tmp_path, **wide)
    assert planned(tmp_path, "--config", path, "--world-size", 8)["matrices_of_teams"]
    path = config(tmp_path, **wide, adaptive_muon_moment2_method="normuon")
    figures = planned(tmp_path, "--config", path, "--world-size", 8)
    assert (figures["matrices_of_teams"], figures["settings"]["team_size"]) == ({}, "1")
    assert "NorMuon has no teams" in message(capsys, "--config", path, "--world-size", 8, "--team-size", 2)


def test_blocks_and_exclusions_come_from_the_file(tmp_path: Path) -> None:
    plain = planned(tmp_path, "--config", config(tmp_path), "--world-size", 2)
    empty = config(tmp_path, muon_exclude="layers*")
    assert planned(tmp_path, "--config", empty, "--world-size", 2)["matrices"] == 0
    path = config(tmp_path, muon_exclude="[linear_proj, layers.1.mlp]", muon_split_gated_mlp="true")
    figures = planned(tmp_path, "--config", path, "--world-size", 2)
    assert (plain["matrices"], figures["matrices"]) == (8, 8 - 2 - 2)
    heads = planned(tmp_path, "--config", config(tmp_path, muon_split_heads="true"), "--world-size", 2)
    assert len({plain["digest"], figures["digest"], heads["digest"]}) == 3


def test_unset_paths_missing_data_and_sizes_of_batches_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    batches = {"micro_batch_size": "3", "global_batch_size": "7"}
    path = config(tmp_path, data_path="${DATA_PATH}/x", tokenizer_type="HuggingFaceTokenizer", **batches)
    assert planned(tmp_path, "--config", path, "--world-size", 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": None}, "num-layers or encoder-num-layers"),
        ({"hidden_size": "many"}, "argument --hidden-size: invalid int value: 'many'"),
        ({"num_attention_heads": "5"}, "megatron-core refuses these settings"),
        ({"pipeline_model_parallel_size": "2"}, "--pipeline-model-parallel-size 2 cannot be planned"),
        ({"tensor_model_parallel_size": "3"}, "world size (8) is not divisible by"),
        ({"outer_dp_sharding_strategy": "optim"}, "--outer-dp-sharding-strategy optim cannot be planned"),
        ({"data_parallel_sharding_strategy": "no_shard"}, "--data-parallel-sharding-strategy no_shard cannot be"),
        ({"num_experts": "2", "moe_layer_freq": "exit()"}, "--moe-layer-freq"),
        ({"muon_exclude": "router"}, "--muon-exclude router matches none of Muon's 8 matrices"),
        (
            {"muon_split_heads": "true", "muon_no_split_qkv": "true"},
            "--muon-no-split-qkv does not work with",
        ),
        ({"muon_ns": "best"}, "argument --muon-ns: invalid choice: 'best'"),
        ({"muon_exchange_buffer_mb": "x"}, "argument --muon-exchange-buffer-mb: invalid float value: 'x'"),
        ({"hybrid_layer_pattern": '"M-?-"', "num_layers": None}, "cannot be planned"),
        ({"muon_coefficient_type": "cans"}, "cans is not stable with --muon-fp32-matmul-prec medium"),
        ({"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"}, "transformer engine"),
    ],
)
def test_configs_that_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], text: str
) -> None:
    assert text in message(capsys, "--config", config(tmp_path, **changes), "--world-size", 8)


def test_arguments_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, empty = tmp_path / "a.json", tmp_path / "empty.json"
    write_layout(layout, Layout(2, (row_sharded("w", (2, 2), [1, 1]),)))
    write_layout(empty, Layout(2, ()))
    quickstart = ("--config", QUICKSTART, "--world-size", 2)
    for argv, text in (
        ((), "give --config FILE.yaml or --hf MODEL"),
        (("--config", QUICKSTART, "--layout", layout), "give --config FILE.yaml or --hf MODEL"),
        (("--config", QUICKSTART), "add --world-size"),
        (("--layout", layout, "--world-size", 4), "a layout of 2 ranks, not 4"),
        (("--layout", empty), "holds no matrices"),
        (("--layout", layout, "--buffer-mb", 0), "--buffer-mb 0 is out of range"),
        (("--layout", layout, "--json", tmp_path / "no" / "plan.json"), "cannot write"),
        (("--layout", layout, "--tokens", 100), "--tokens 100 needs --config FILE.yaml"),
        ((*quickstart, "--tokens", 100, "--hardware", "cpu-2core"), "for GPUs alone"),
        ((*quickstart, "--mfu", 1.5), "--mfu must be above 0 and at most 1, got 1.5"),
    ):
        assert text in message(capsys, *argv)


def test_a_plan_of_a_layout_needs_neither_torch_nor_megatron(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout.json", Layout(2, (row_sharded("w", (64, 32), [40, 24]),)))
    code = (
        "import sys; from megatron_muon import cli; "
        f"code = cli.main(['plan', '--layout', {str(tmp_path / 'layout.json')!r}]); "
        "sys.exit(code or any(name.split('.')[0] in ('torch', 'megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("name", "world_size"), [("llama3-8b", 64), ("quickstart", 4)])
@pytest.mark.parametrize(("hardware", "products"), [("cpu-2core", HALVES), ("h100-sxm", KERNEL), ("a100-sxm", DENSE)])
def test_a_plan_names_the_owners_that_training_would(
    monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, hardware: str, products: Products
) -> None:
    """Plans counted Gram runs of three steps where bf16 trains with two: for llama3-8b 32 of 128 owners differed."""
    monkeypatch.setattr(arguments, "cpu_has_bf16", lambda: True)  # without it a processor's plan is of fp32
    monkeypatch.setattr(newton_schulz, "products_on", lambda device, dtype: products)
    config, groups, _ = plan_command.read_config(CONFIGS / f"{name}.yaml", world_size, HARDWARE[hardware])
    settings = plan_command.settings_of(config, HARDWARE[hardware])
    orthogonalizer = Orthogonalizer()
    other = Iteration(precision="high", products=products)
    for group in groups:
        planned = plan_group(group, settings, HARDWARE[hardware]).plan
        layout = group.layout
        costs = [orthogonalizer.flops(matrix) for matrix in layout.matrices]
        nodes = [rank // HARDWARE[hardware].node_ranks for rank in range(layout.world_size)]
        memory, rules = Memory(2, orthogonalizer.iteration), TeamRules(orthogonalizer.iteration.cost, nodes)
        trained = make_plan(layout, costs, memory=memory, rules=rules)
        assert planned.owners == trained.owners
        assert planned.waves == trained.waves
        if name == "llama3-8b" and products is DENSE:
            wrong = [sum(other.flops(*block) for block in matrix.blocks) for matrix in layout.matrices]
            assert make_plan(layout, wrong, memory=memory, rules=rules).owners != trained.owners
