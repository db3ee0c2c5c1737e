"""`megatron-muon plan` and `benchmarks.rehearse`: the shipped models at every size, what agrees,
and what users get wrong.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearse import __main__ as rehearse
from megatron_muon import cli
from megatron_muon.core import newton_schulz
from megatron_muon.core import plan as core_plan
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import DENSE, HALVES, KERNEL, Iteration, Products
from megatron_muon.core.exchange import Exchange
from megatron_muon.core.memory import Memory
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import make_plan
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.tools.plan import plan_command
from megatron_muon.tools.plan.estimate import HARDWARE, plan_group

CONFIGS = Path(__file__).parents[2] / "configs"
OF_QUICKSTART = ("--config", CONFIGS / "quickstart.yaml", "--world-size")


def main(command: str, *argv: object) -> int:
    words = list(map(str, argv))
    return rehearse.main(words) if command == "rehearse" else cli.main([command, *words])


def planned(
    tmp_path: Path, *argv: object, command: str = "plan", status: int = 0
) -> dict[str, Any]:
    target = tmp_path / "figures.json"
    assert main(command, *argv, "--json", target) == status
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
        pytest.param(
            "moe-large",
            4096,
            48 * (64 * 2 + 5),
            None,
            False,
            marks=pytest.mark.wide,
        ),
    ],
)
def test_the_shipped_models_are_planned(
    tmp_path: Path, name: str, world_size: int, matrices: int, parameters: int | None, is_even: bool
) -> None:
    figures = planned(tmp_path, "--config", CONFIGS / f"{name}.yaml", "--world-size", world_size)
    assert figures["matrices"] == matrices
    assert parameters is None or figures["parameters"] == parameters
    assert (figures["max_over_mean"] <= 1.05) is is_even
    assert 0 < figures["extra_bytes"] <= figures["buffer_bytes"]
    assert 0 < figures["ns_ms"] <= figures["step_ms"]


def test_a_shipped_model_takes_no_more_than_it_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Teams cut what does not fit whole; a number that is too small is an error, and the one that
    it names works.
    """
    run = ("--config", CONFIGS / "llama3-8b.yaml", "--world-size", 64)
    usual, tight = (
        planned(tmp_path, *run),
        planned(tmp_path, *run, "--muon-exchange-buffer-mb", 512),
    )
    assert usual["buffer_bytes"] > 2**30
    assert usual["groups"][0]["matrices_of_teams"] == {}
    assert tight["groups"][0]["matrices_of_teams"]
    assert tight["extra_bytes"] <= tight["buffer_bytes"] == 2**29
    capsys.readouterr()
    found = re.search(
        r"needs ([0-9.]+); give at least that",
        message(capsys, *run, "--muon-exchange-buffer-mb", 64),
    )
    assert found
    assert (
        planned(tmp_path, *run, "--muon-exchange-buffer-mb", found[1])["extra_bytes"]
        <= float(found[1]) * 2**20
    )


def test_the_page_leads_with_what_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory and time first; groups and parts, which hid them, are only in the JSON file."""
    experts = {
        "num_experts": "4",
        "expert_model_parallel_size": "2",
        "moe_router_load_balancing_type": "none",
    }
    path = config(tmp_path, **experts, global_batch_size="8")
    figures = planned(tmp_path, "--config", path, "--world-size", 8)
    assert [(group["name"], group["ranks"]) for group in figures["groups"]] == [
        ("dense", 8),
        ("experts", 4),
    ]
    shown = capsys.readouterr().out
    headings = [
        "memory of a GPU",
        "with Muon it fits: a GPU has 74.5 GiB",
        "a step of 256 tokens",
        "step, overlapped",
    ]
    assert sorted(headings, key=shown.index) == headings
    assert f"digest {figures['digest']}" in shown
    more = (
        "dense.waves",
        "experts.step_ms",
        "training_step.adam_ms.forward_backward",
    )
    assert not [text for text in more if text in shown]


def test_settings_come_from_the_line_then_the_file(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        muon_fp32_matmul_prec="highest",
        muon_exchange_buffer_mb="1",
        muon_ns="gram",
        muon_team_size="2",
    )
    figures = planned(tmp_path, "--config", path, "--world-size", 2)
    names = ("buffer_mb", "exchange_dtype", "team_size", "ns", "ns_dtype", "ns_steps")
    assert figures["settings"] == dict(
        zip(names, (1.0, "fp32", "2", "gram", "fp32", 5), strict=True)
    )
    line = (
        "--muon-ns",
        "standard",
        "--muon-fp32-matmul-prec",
        "medium",
        "--muon-exchange-buffer-mb",
        64,
    )
    more = ("--muon-exchange-dtype", "fp32", "--unset", "muon-team-size", "--global-batch-size", 4)
    figures = planned(tmp_path, "--config", path, "--world-size", 2, *line, *more)
    assert figures["settings"] == dict(
        zip(names, (64.0, "fp32", "auto", "standard", "bf16", 5), strict=True)
    )
    assert figures["training_step"]["tokens"] == 4 * 32


EXPERTS = {
    "num_experts": "4",
    "expert_model_parallel_size": "4",
    "moe_router_load_balancing_type": "none",
}


def test_team_sizes_that_a_plan_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one group cannot have others have: two ranks share an expert at 8, and one has nothing
    to share at 4.
    """
    run = ("--config", config(tmp_path, **EXPERTS), "--world-size")
    said = message(capsys, *run, 4, "--muon-team-size", 8)
    assert "--muon-team-size 8 is more than the ranks of a node that share these matrices" in said
    assert said.endswith("; use auto, or 4\n")
    assert planned(tmp_path, *run, 4, "--muon-team-size", 2)["groups"][0]["matrices_of_teams"]
    capsys.readouterr()
    figures = planned(tmp_path, *run, 8, "--muon-team-size", 4)
    dense, expert = figures["groups"]
    assert (list(dense["matrices_of_teams"]), expert["matrices_of_teams"]) == (["4"], {})
    (said,) = figures["notes"]
    assert said.endswith("1 is used for expert matrices")
    assert said in capsys.readouterr().out


def test_normuon_is_planned_without_teams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owners need whole updates, so training forms no teams."""
    wide = {
        "num_layers": "1",
        "ffn_hidden_size": "65536",
        "hidden_size": "2048",
        "optimizer": "adaptive_muon",
    }
    path = config(tmp_path, **wide)
    assert planned(tmp_path, "--config", path, "--world-size", 8)["groups"][0]["matrices_of_teams"]
    path = config(tmp_path, **wide, adaptive_muon_moment2_method="normuon")
    figures = planned(tmp_path, "--config", path, "--world-size", 8)
    assert (figures["groups"][0]["matrices_of_teams"], figures["settings"]["team_size"]) == (
        {},
        "1",
    )
    said = message(capsys, "--config", path, "--world-size", 8, "--muon-team-size", 2)
    assert "NorMuon needs whole updates" in said


def test_blocks_and_exclusions_come_from_the_file(tmp_path: Path) -> None:
    plain, heads, empty = (
        planned(tmp_path, "--config", config(tmp_path, **changes), "--world-size", 2)
        for changes in ({}, {"muon_split_heads": "true"}, {"muon_exclude": "layers*"})
    )
    assert (plain["matrices"], heads["matrices"], empty["matrices"]) == (8, 8, 0)
    assert plain["digest"] != heads["digest"]


def test_unset_paths_missing_data_and_sizes_of_batches_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    batches = {"micro_batch_size": "3", "global_batch_size": "7"}
    path = config(
        tmp_path, data_path="${DATA_PATH}/x", tokenizer_type="HuggingFaceTokenizer", **batches
    )
    assert planned(tmp_path, "--config", path, "--world-size", 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": None}, "num-layers or encoder-num-layers"),
        ({"hidden_size": "many"}, "argument --hidden-size: invalid int value: 'many'"),
        ({"num_attention_heads": "5"}, "megatron-core refuses these settings"),
        (
            {"pipeline_model_parallel_size": "2"},
            "--pipeline-model-parallel-size 2 cannot be planned",
        ),
        ({"tensor_model_parallel_size": "3"}, "world size (8) is not divisible by"),
        (
            {"outer_dp_sharding_strategy": "optim"},
            "--outer-dp-sharding-strategy optim cannot be planned",
        ),
        (
            {"data_parallel_sharding_strategy": "no_shard"},
            "--data-parallel-sharding-strategy no_shard cannot be",
        ),
        ({"num_experts": "2", "moe_layer_freq": "exit()"}, "--moe-layer-freq"),
        ({"muon_exclude": "router"}, "--muon-exclude router matches none of Muon's 8 matrices"),
        (
            {"muon_split_heads": "true", "muon_no_split_qkv": "true"},
            "--muon-no-split-qkv does not work with",
        ),
        ({"muon_ns": "best"}, "argument --muon-ns: invalid choice: 'best'"),
        (
            {"muon_exchange_buffer_mb": "x"},
            "argument --muon-exchange-buffer-mb: invalid float value: 'x'",
        ),
        ({"hybrid_layer_pattern": '"M-?-"', "num_layers": None}, "cannot be planned"),
        (
            {"muon_coefficient_type": "cans"},
            "cans is not stable with --muon-fp32-matmul-prec medium",
        ),
        (
            {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"},
            "transformer engine",
        ),
    ],
)
def test_configs_that_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], text: str
) -> None:
    assert text in message(capsys, "--config", config(tmp_path, **changes), "--world-size", 8)


@pytest.mark.parametrize(
    ("command", "argv", "text"),
    [
        ("plan", ("--world-size", 2), "one of the arguments --config --hf is required"),
        ("plan", OF_QUICKSTART[:2], "the following arguments are required: --world-size"),
        ("plan", (*OF_QUICKSTART, 2**21), "--world-size must be at most 1,048,576"),
        ("plan", (*OF_QUICKSTART, 2, "--muon-team-sise", 2), "did you mean --muon-team-size?"),
        (
            "plan",
            (*OF_QUICKSTART, 2, "--muon-exchange-buffer-mb", 0),
            "-buffer-mb 0 is out of range",
        ),
        ("plan", (*OF_QUICKSTART, 2, "--mfu", 1.5), "--mfu must be above 0 and at most 1, got 1.5"),
        ("plan", (*OF_QUICKSTART, 2, "--json", "no/plan.json"), "cannot write"),
        (
            "plan",
            ("--hf", "model", "--world-size", 2, "--muon-ns", "gram"),
            "leave --muon-ns gram out",
        ),
        (
            "plan",
            (*OF_QUICKSTART, 2, "--ep", 2),
            "--ep is for --hf; with --config give --expert-model-parallel-size 2",
        ),
        ("rehearse", (*OF_QUICKSTART, 4, "--ranks", 0, 4), "--ranks 4 is not a rank of 4"),
        ("rehearse", (*OF_QUICKSTART, 0), "must be a whole number of at least 1"),
        (
            "rehearse",
            (*OF_QUICKSTART, 2, "--muon-exchange", "allgather"),
            "allgather is not rehearsed",
        ),
    ],
)
def test_arguments_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], command: str, argv: tuple[object, ...], text: str
) -> None:
    assert main(command, *argv) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("name", "world_size"), [("llama3-8b", 64), ("quickstart", 4)])
@pytest.mark.parametrize(
    ("hardware", "products"), [("cpu-2core", HALVES), ("h100-sxm", KERNEL), ("a100-sxm", DENSE)]
)
def test_a_plan_names_the_owners_that_training_would(
    monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, hardware: str, products: Products
) -> None:
    """Plans counted Gram runs of three steps where bf16 trains with two: for llama3-8b 32 of 128
    owners differed.
    """
    # without it a processor's plan is of fp32
    monkeypatch.setattr(arguments, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(newton_schulz, "products_on", lambda device, dtype: products)
    config, groups, _ = plan_command.read_config(
        CONFIGS / f"{name}.yaml", world_size, HARDWARE[hardware]
    )
    settings = plan_command.settings_of(config, HARDWARE[hardware])
    orthogonalizer = Orthogonalizer()
    other = Iteration(precision="high", products=products)
    for group in groups:
        planned = plan_group(group, settings, HARDWARE[hardware]).plan
        layout = group.layout
        costs = [orthogonalizer.flops(matrix) for matrix in layout.matrices]
        nodes = [rank // HARDWARE[hardware].node_ranks for rank in range(layout.world_size)]
        memory, rules = (
            Memory(2, orthogonalizer.iteration),
            TeamRules(orthogonalizer.iteration.cost, nodes),
        )
        trained = make_plan(layout, costs, memory=memory, rules=rules)
        assert planned.owners == trained.owners
        assert planned.waves == trained.waves
        if name == "llama3-8b" and products is DENSE:
            wrong = [
                sum(other.flops(*block) for block in matrix.blocks) for matrix in layout.matrices
            ]
            assert make_plan(layout, wrong, memory=memory, rules=rules).owners != trained.owners


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("quickstart", 4),
        pytest.param("quickstart", 2, marks=pytest.mark.wide),
        pytest.param("llama3-8b", 8, marks=pytest.mark.wide),
        pytest.param("llama3-8b", 64, marks=pytest.mark.wide),
    ],
)
def test_plan_and_rehearsal_agree(tmp_path: Path, name: str, world_size: int) -> None:
    """Bytes and products to the last one; memory within 10 %. Plans counted 1.4 to 3 times what a
    step takes.
    """
    figures = planned(
        tmp_path,
        "--config",
        CONFIGS / f"{name}.yaml",
        "--world-size",
        world_size,
        command="rehearse",
    )
    expected, found = figures["planned"], figures["rehearsed"]
    assert found["received_bytes"] == expected["received_bytes"] > 0
    assert found["extra_bytes"] == pytest.approx(expected["extra_bytes"], rel=0.1)
    assert found["flops"] == pytest.approx(expected["flops"], rel=1e-6)
    assert figures["ranks"] == list(range(world_size))


@pytest.mark.wide
@pytest.mark.parametrize("buffer_mb", [256, 128])
def test_experts_that_leave_a_remainder_on_512_ranks_take_no_more_than_the_buffer(
    tmp_path: Path, buffer_mb: int
) -> None:
    """xtuner #2069: 38 experts of two layers on each of 8 parts: 76 matrices of a kind on 64 ranks,
    12 too many.
    """
    few = ("--num-layers", 2, "--num-experts", 304, "--muon-exchange-buffer-mb", buffer_mb)
    run = ("--config", CONFIGS / "moe-large.yaml", "--world-size", 512, "--ranks", 0, 9, 511)
    figures = planned(tmp_path, *run, *few, command="rehearse")
    assert figures["findings"] == []
    assert figures["planned"]["extra_bytes"] <= buffer_mb * 2**20
    assert figures["rehearsed"]["extra_bytes"] <= buffer_mb * 2**20


@pytest.mark.wide
def test_72_rows_over_16_ranks_are_rehearsed(tmp_path: Path) -> None:
    """prime-rl #3437, as Megatron-FSDP cuts it."""
    path = config(tmp_path, hidden_size="72", ffn_hidden_size="72", num_attention_heads="6")
    run = ("--config", path, "--world-size", 16, "--muon-exchange-buffer-mb", 0.5)
    figures = planned(tmp_path, *run, command="rehearse")
    assert figures["findings"] == []
    assert figures["rehearsed"]["extra_bytes"] <= 2**19


def test_ranks_that_do_not_agree_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Exchange.__init__

    def swapped(exchange: Exchange, *args: Any, **kwargs: Any) -> None:
        make(exchange, *args, **kwargs)
        if exchange._rank == 2:
            exchange._waves[:2] = exchange._waves[1::-1]

    monkeypatch.setattr(Exchange, "__init__", swapped)
    monkeypatch.setattr(core_plan, "SMALL_BYTES", 0)  # several waves
    argv = (*OF_QUICKSTART, 4)
    figures = planned(tmp_path, *argv, command="rehearse", status=1)
    assert figures["findings"]
    assert all(
        finding["check"] == "bytes" and 2 in finding["ranks"] for finding in figures["findings"]
    )
    out = capsys.readouterr().out
    assert "bytes, ranks 0, 2: step 0" in out or "bytes, ranks 2, 0: step 0" in out
    assert "agree" not in out.splitlines()[-1]


def test_a_file_that_cannot_be_written_loses_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    argv = (*OF_QUICKSTART, 4, "--ranks", 3, 1, "--node-ranks", 2)
    assert rehearse.main([*map(str, argv), "--json", str(tmp_path / "missing" / "step.json")]) == 2
    out, error = capsys.readouterr()
    assert "ranks, layout and plan agree" in out
    assert "2 of 4 ranks" in out
    assert "the other ranks' messages" in out
    assert "rehearsing 2 ranks ...\n" in error
    assert "cannot write" in error.splitlines()[-1]
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning)]
