"""Which parameters `megatron_muon.Muon` takes, and which it refuses, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_muon
from megatron_muon.core.errors import UserError
from megatron_muon.fsdp.selection import select
from tests.support.small_model import Model


def test_who_takes_what_can_be_read_and_changed() -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    table = optimizer.table()
    for line in (
        r"muon +2 +96 +\d+\.\d%",
        r"muon +1 +8 x 6  layers\.0\.weight$",
        r"adamw +1 +10 x 6  embed_tokens\.weight \(embedding\)$",
        r"adamw +1 +10 x 6  lm_head\.weight \(output layer\)$",
        r"adamw +1 +2 x 1 x 3 x 3  conv\.weight \(4D\)$",
        r"adamw +1 +scalar  scale \(0D; no weight decay\)$",
    ):
        assert re.search("^" + line, table, re.MULTILINE), (line, table)

    def taken(**given: Any) -> list[str]:
        selection = select(model.named_parameters(), **given)
        return [selection.names[p] for group in selection.muon for p in group["params"]]

    assert taken() == ["layers.0.weight", "layers.1.weight"]
    assert taken(matrices=["layers.*.weight", "lm_head"]) == ["layers.0.weight", "layers.1.weight", "lm_head.weight"]
    assert taken(matrices=lambda name, p: p.shape == (6, 8)) == ["layers.1.weight"]
    assert taken(exclude=["layers.0"]) == ["layers.1.weight"]


NAMES = {
    "adamw": (
        "shared",
        "model.shared",
        "tok_emb",
        "encoder.layers.0.attention.relative_attention_bias",
        "to_logits",
        "fc",
    ),
    "muon": ("layers.0.fc1", "encoder.layer.0.output.dense", "h.3.attn.c_proj", "shared_experts.up_proj"),
}


@pytest.mark.parametrize(("optimizer", "name"), [(o, name) for o, names in NAMES.items() for name in names])
def test_names_of_tables_outputs_and_matrices(optimizer: str, name: str) -> None:
    selection = select([(f"{name}.weight", nn.Parameter(torch.ones(3, 4))), ("layers.0.up.weight", ONE)])
    assert ONE in {p for group in selection.muon for p in group["params"]}
    assert [group["optimizer"] for group in (*selection.muon, *selection.adamw) for _ in group["params"]].count(
        optimizer
    ) == (2 if optimizer == "muon" else 1)


def test_patterns_choose_among_matrices() -> None:
    """Biases and norms that a pattern finds too are no mistake."""
    layers = [("layers.0.weight", ONE), ("layers.0.bias", nn.Parameter(torch.ones(3)))]
    selection = select(layers, matrices=["layers.*"])
    assert [selection.names[p] for group in selection.muon for p in group["params"]] == ["layers.0.weight"]


def wrong(**given: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(Model().named_parameters(), **given)


def groups(*members: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(list(members))


ONE = nn.Parameter(torch.ones(3, 4))
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a module": (lambda: megatron_muon.Muon(Model()), TypeError, r"pass model\.named_parameters\(\)"),
    "nothing": (lambda: megatron_muon.Muon([]), UserError, "params is empty"),
    "no matrix": (lambda: megatron_muon.Muon([("a", nn.Parameter(torch.ones(3)))]), UserError, "no parameter is a"),
    "1D without names": (groups(ONE, nn.Parameter(torch.ones(3))), UserError, r"parameter 1 has shape \(3,\)"),
    "0D": (lambda: megatron_muon.Muon([nn.Parameter(torch.ones(()))]), UserError, r"parameter 0 has shape \(\)"),
    "4D by pattern": (
        wrong(matrices=["conv.weight"]),
        UserError,
        r"only parameters that Muon does not take \(conv\.weight\)",
    ),
    "3D by group": (
        groups({"params": [("experts", nn.Parameter(torch.ones(2, 3, 4)))], "optimizer": "muon"}),
        UserError,
        r"experts has shape \(2, 3, 4\)",
    ),
    "twice": (groups(("a", ONE), ("b", ONE)), UserError, "b is given twice"),
    "an empty group": (groups({"params": [ONE]}, {"params": []}), UserError, "group 1 has no parameters"),
    "a string": (groups("layers"), TypeError, "is a str, not a tensor"),
    "complex": (groups(("a", nn.Parameter(torch.ones(3, 3).cfloat()))), UserError, "a is of torch.complex64"),
    "another optimizer": (groups({"params": [ONE], "optimizer": "lion"}), UserError, "choose 'muon' or 'adamw'"),
    "a group's steps": (
        groups({"params": [ONE], "ns_steps": 3}),
        UserError,
        "parameter group 0 has ns_steps=3, which holds for the whole optimizer; pass it to Muon",
    ),
    "a key of others": (
        groups({"params": [ONE], "use_muon": False}),
        UserError,
        "^parameter group 0 has use_muon=False, which Muon does not know; a group may have lr, .*, optimizer, ",
    ),
    "AdamW's betas for Muon": (
        groups({"params": [ONE], "optimizer": "muon", "betas": (0.9, 0.9)}),
        UserError,
        r"has betas=\(0.9, 0.9\), which has no effect with optimizer='muon'; leave it out",
    ),
    "fp16": (groups(("a", nn.Parameter(torch.ones(3, 3).half()))), UserError, "a is of torch.float16; .*: use bf16"),
    "fp8": (
        groups(("a", nn.Parameter(torch.ones(3, 3).to(torch.float8_e4m3fn)))),
        UserError,
        "a is of torch.float8_e4m3fn",
    ),
    "a group's betas": (
        groups({"params": [ONE], "betas": (2.0, 0.9)}),
        UserError,
        r"betas\[0\] of parameter group 0 2 is out of range",
    ),
    "no rows": (groups(nn.Parameter(torch.ones(0, 4))), UserError, r"parameter 0 has shape \(0, 4\)"),
    "a set that is not there": (wrong(ns_coefficients="nope"), UserError, "^ns_coefficients nope does not exist"),
    "two coefficients": (wrong(ns_coefficients=(1.0, 2.0)), UserError, "are not numbers"),
    "one beta": (wrong(adamw_betas=0.9), UserError, "adamw_betas=0.9 are not two numbers"),
    "the second moment's eps": (
        wrong(moment2_method="normuon", moment2_eps=0.0),
        UserError,
        "^moment2_eps 0 is out of range",
    ),
    "a pattern of nothing": (
        wrong(exclude=["router"]),
        UserError,
        "^exclude router matches none of Muon's 2 matrices by whole components of their names$",
    ),
    "one pattern": (wrong(matrices="layers"), UserError, "pass a list of patterns"),
    "steps": (wrong(ns_steps=0), UserError, r"^ns_steps 0 is out of range"),
    "momentum": (wrong(momentum=1.0), UserError, r"^momentum 1 is out of range"),
    "lr": (wrong(lr=-1.0), UserError, r"^lr -1 is out of range"),
    "nan": (wrong(adamw_lr=math.nan), UserError, r"^adamw_lr nan is not finite"),
    "exchange": (
        wrong(exchange="ring"),
        UserError,
        "exchange='ring' does not exist; choose one of 'owner', 'allgather'",
    ),
    "a team of three": (
        wrong(team_size="3"),
        UserError,
        "team_size='3' does not exist; choose one of 'auto', '1', '2'",
    ),
    "teams without shards": (
        wrong(team_size="2"),
        UserError,
        r"team_size='2' has no effect here, where no rank owns a sharded matrix \(local\); leave it out",
    ),
    "a graph on a CPU": (
        wrong(cuda_graph=True),
        UserError,
        "cuda_graph=True needs a GPU, and the parameters are on cpu; leave it out",
    ),
    "a graph of staged momentum": (
        wrong(cuda_graph=True, offload="cpu"),
        UserError,
        "offload='cpu' is not supported with cuda_graph=True; use offload='none'",
    ),
    "a graph that is measured": (
        wrong(cuda_graph=True, metrics_interval=5),
        UserError,
        "metrics_interval=5 is not supported with cuda_graph=True; use metrics_interval=0",
    ),
    "adjust_lr_fn": (wrong(adjust_lr_fn="max"), UserError, "adjust_lr_fn='max' does not exist"),
    "unproven": (wrong(ns_coefficients="cans"), UserError, "^ns_coefficients cans is not stable with fp32_matmul_prec"),
    "gram, unproven": (
        wrong(ns_coefficients=(3.0, -3.2, 1.2), ns_steps=7, ns="gram"),
        UserError,
        "^ns gram is not stable in bf16 with 7 steps of ns_coefficients",
    ),
    "no folder": (wrong(offload="nvme"), UserError, "offload='nvme' and offload_dir belong together"),
    "a group's lr": (groups({"params": [ONE], "lr": -1.0}), UserError, "lr of parameter group 0 -1 is out of range"),
    "a group that is not shared": (wrong(process_group=object()), UserError, "process_group is for share_replicated"),
    "no ranks": (wrong(share_replicated=True), UserError, "share_replicated needs ranks"),
    "split": (wrong(split={"layers.0": (3, 4)}), UserError, r"layers\.0\.weight has 8 rows"),
    "split of nothing": (wrong(split={"qkv": (3,)}), UserError, "split qkv matches none of Muon's 2 matrices"),
    "split by fractions": (
        wrong(split={"layers.0": 4.0}),
        UserError,
        r"^split: 'layers\.0' has 4\.0; give whole numbers of rows",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_by_name(case: str) -> None:
    act, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        act()


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_frozen_weights_may_have_any_dtype(dtype: torch.dtype) -> None:
    """As of the base model under LoRA: fp16, or codes of a quantization."""
    base = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    assert select([("base", base), ("lora", ONE)]).frozen == [base]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def sharded(shape: tuple[int, int], mesh: Any, *placements: Any) -> nn.Parameter:
    local = torch.empty(shape).chunk(4)[0] if Shard(0) in placements else torch.empty(shape)
    return nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(4, 1))
    )


def test_fsdps_cpu_offload_is_refused(four_ranks: None) -> None:
    """Its parameters lie on the CPU, and their mesh is the GPUs'."""
    like = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cuda", (4,)), (Shard(0),), like)
    with pytest.raises(UserError, match=r"w lies on cpu and its mesh on cuda, .* give Muon offload='cpu'"):
        megatron_muon.Muon([("w", nn.Parameter(DTensor(torch.empty(2, 4), spec, requires_grad=False)))])


def test_dtensors_that_muon_cannot_take_are_refused_by_name(four_ranks: None) -> None:
    row, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows = sharded((8, 4), row, Shard(0))
    for parameters, message in (
        ([("w", sharded((8, 4), row, Shard(1)))], r"w is sharded by columns \(S\(1\)\); Muon takes rows"),
        ([("w", sharded((8, 4), row, Partial()))], r"w has unreduced values"),
        (
            [("v", rows), ("w", sharded((8, 4), other, Replicate(), Shard(0)))],
            "w is on .* and v on .*make one for each",
        ),
        ([("v", rows), ("w", nn.Parameter(torch.ones(2, 2)))], r"w is on no mesh \(a plain tensor\) and v on"),
    ):
        with pytest.raises(UserError, match=message):
            megatron_muon.Muon(parameters)
