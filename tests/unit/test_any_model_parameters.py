"""Which parameters `megatron_muon.Muon` takes, and which it refuses, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_muon
from megatron_muon.core.user_errors import UserError
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
        return [selection.name(p) for p in selection.views]

    assert taken() == ["layers.0.weight", "layers.1.weight"]
    assert taken(matrices=["layers.*.weight", "lm_head"]) == [
        "layers.0.weight",
        "layers.1.weight",
        "lm_head.weight",
    ]
    assert taken(matrices=lambda name, p: p.shape == (6, 8)) == ["layers.1.weight"]
    assert taken(exclude=["layers.0"]) == ["layers.1.weight"]


BIAS = "encoder.layers.0.attention.relative_attention_bias"
NAMES = {
    "adamw": (
        "layers.0.cls_token",
        "register_tokens",
        "object_queries",
        "layers.0.rel_pos_h",
        "codebook",
        "shared",
        "model.shared",
        "tok_emb",
        BIAS,
        "to_logits",
        "fc",
        "value_head",
        "v_head.summary",
        "score",
        "generator",
        "generator.proj",
        "lm_heads",
        "logits",
        "reward_head",
    ),
    "muon": (
        "layers.0.fc1",
        "encoder.layer.0.output.dense",
        "h.3.attn.c_proj",
        "shared_experts.up_proj",
        "generator.fc1",
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "name"), [(o, name) for o, names in NAMES.items() for name in names]
)
def test_names_of_tables_outputs_and_matrices(optimizer: str, name: str) -> None:
    # a parameter, and not a module's
    is_own = name.endswith(("token", "tokens", "queries", "rel_pos_h", "codebook"))
    own = name if is_own else f"{name}.weight"
    selection = select([(own, nn.Parameter(torch.ones(3, 4))), ("layers.0.up.weight", ONE)])
    taken = [
        group["optimizer"] for group in selection.groups for p in group["params"] if p is not ONE
    ]
    assert taken == [optimizer]


def test_patterns_choose_among_matrices() -> None:
    """Biases and norms that a pattern finds too are no mistake."""
    layers = [("layers.0.weight", ONE), ("layers.0.bias", nn.Parameter(torch.ones(3)))]
    selection = select(layers, matrices=["layers.*"])
    assert [selection.name(p) for p in selection.views] == ["layers.0.weight"]


def wrong(**given: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(Model().named_parameters(), **given)


def groups(*members: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(list(members))


ONE = nn.Parameter(torch.ones(3, 4))


def of(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape).to(dtype))


HYPERBALL: dict[str, Any] = {"hyperball": True, "weight_decay": 0.0}
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a module in a list": (
        groups(Model()),
        r"is a Model, not a tensor; pass model\.named_parameters\(\)",
    ),
    "a string": (groups("layers"), "is a str, not a tensor"),
    "nothing": (lambda: megatron_muon.Muon([]), "params is empty"),
    "no matrix": (groups(("a", of(3))), "no parameter is a matrix"),
    "1D without names": (groups(ONE, of(3)), r"parameter 1 has shape \(3,\)"),
    "0D": (groups(of()), r"parameter 0 has shape \(\)"),
    "4D by pattern": (
        wrong(matrices=["conv.weight"]),
        r"only parameters that are not among these \(conv",
    ),
    "3D without names": (groups(of(2, 3, 4)), r"parameter 0 has shape \(2, 3, 4\)"),
    "a kernel by group": (
        groups({"params": [("w", of(8, 3, 5, 5))], "optimizer": "muon"}),
        "it is a convolution or in",
    ),
    "stack and flat": (
        wrong(flatten={"conv": True}, stacks=["conv"]),
        "conv.weight is named in flatten= and in stacks=",
    ),
    "a stack of biases": (
        groups({"params": [("w", of(2, 1, 4))], "optimizer": "muon"}),
        r"w has shape \(2, 1, 4\)",
    ),
    "channels_last": (
        lambda: megatron_muon.Muon(
            [
                ("conv", nn.Parameter(of(2, 3, 3, 3).to(memory_format=torch.channels_last))),
            ],
            flatten={"*": True},
        ),
        "conv is not contiguous, strides .* leave it out of flatten=",
    ),
    "no rows": (groups(of(0, 4)), r"parameter 0 has shape \(0, 4\)"),
    "twice": (groups(("a", ONE), ("b", ONE)), "b is given twice"),
    "two of one name": (
        groups(
            {"params": [("w", ONE)]},
            {"params": [("w", of(2, 1, 3, 3))]},
        ),
        "w is given twice; pass each parameter once, by a name of its own",
    ),
    "an empty group": (groups({"params": [ONE]}, {"params": []}), "group 1 has no parameters"),
    "fp16": (groups(("a", of(3, 3, dtype=torch.float16))), "a is of torch.float16; .*: use bf16"),
    "fp8": (groups(("a", of(3, 3, dtype=torch.float8_e4m3fn))), "a is of torch.float8_e4m3fn"),
    "complex": (groups(("a", of(3, 3, dtype=torch.complex64))), "a is of torch.complex64"),
    "another optimizer": (
        groups({"params": [ONE], "optimizer": "lion"}),
        "choose 'muon' or 'adamw'",
    ),
    "a group's steps": (
        groups({"params": [ONE], "ns_steps": 3}),
        "group 0 has ns_steps=3, .*; pass it to Muon",
    ),
    "a key of others": (
        groups({"params": [ONE], "use_muon": False}),
        (
            "group 0 has use_muon=False, which Muon does not know; a group may have lr, .*,"
            " optimizer, "
        ),
    ),
    "AdamW's betas for Muon": (
        groups({"params": [ONE], "optimizer": "muon", "betas": (0.9, 0.9)}),
        r"has betas=\(0.9, 0.9\), which has no effect with optimizer='muon'; leave it out",
    ),
    "a group's betas": (
        groups({"params": [ONE], "betas": (2.0, 0.9)}),
        r"betas\[0\] of parameter group 0 2 is out",
    ),
    "a group's lr": (
        groups({"params": [ONE], "lr": -1.0}),
        "lr of parameter group 0 -1 is out of range",
    ),
    "a set that is not there": (
        wrong(ns_coefficients="nope"),
        "^ns_coefficients nope does not exist",
    ),
    "turned": (wrong(ns_coefficients=(-3.4445, 4.775, -2.0315)), "singular values between"),
    "blown up": (wrong(ns_coefficients=(2.0, 0.0, 0.0)), "singular values between"),
    "two coefficients": (wrong(ns_coefficients=(1.0, 2.0)), r"is not \(a, b, c\), or a sequence"),
    "unproven": (
        wrong(ns_coefficients="cans"),
        "^ns_coefficients cans is not stable with fp32_matmul_prec",
    ),
    "gram, unproven": (
        wrong(ns_coefficients=(3.0, -3.2, 1.2), ns_steps=7, ns="gram"),
        "^ns gram is not stable in bf16 with 7 steps of ns_coefficients",
    ),
    "one beta": (wrong(adamw_betas=0.9), "adamw_betas=0.9 are not two numbers"),
    "moment2_eps": (
        wrong(moment2_method="normuon", moment2_eps=0.0),
        "^moment2_eps 0 is out of range",
    ),
    "a pattern of nothing": (
        wrong(exclude=["router"]),
        "^exclude router matches none of Muon's 2 matrices",
    ),
    "one pattern": (wrong(matrices="layers"), "pass a list of patterns"),
    "steps": (wrong(ns_steps=0), r"^ns_steps 0 is out of range"),
    "momentum": (wrong(momentum=1.0), r"^momentum 1 is out of range"),
    "lr": (wrong(lr=-1.0), r"^lr -1 is out of range"),
    "nan": (wrong(adamw_lr=math.nan), r"^adamw_lr nan is not finite"),
    "exchange": (
        wrong(exchange="ring"),
        "exchange='ring' does not exist; choose one of 'owner', 'allgather'",
    ),
    "a choice that is None": (
        wrong(offload=None),
        "offload=None does not exist; choose one of 'none'",
    ),
    "a team of three": (
        wrong(team_size="3"),
        "team_size='3' does not exist; choose one of 'auto', '1', '2'",
    ),
    "teams without shards": (
        wrong(team_size="2"),
        "team_size='2' has no effect here: no rank owns",
    ),
    "a rate that is text": (wrong(lr="0.1"), r"lr '0\.1' is not a number"),
    "a decay that is text": (wrong(weight_decay="0.1"), r"weight_decay '0\.1' is not a number"),
    "a graph on a CPU": (
        wrong(cuda_graph=True),
        "cuda_graph=True needs a GPU, and the parameters are on cpu; leave",
    ),
    "a graph of staged momentum": (
        wrong(cuda_graph=True, offload="cpu"),
        "with cuda_graph=True; use offload='none'",
    ),
    "a graph, measured": (
        wrong(cuda_graph=True, metrics_interval=5),
        "metrics_interval=5 is not supported with cuda",
    ),
    "adjust_lr_fn": (wrong(adjust_lr_fn="max"), "adjust_lr_fn='max' does not exist"),
    "no folder": (wrong(offload="nvme"), "offload='nvme' and offload_dir belong together"),
    "a group that is not shared": (
        wrong(process_group=object()),
        "process_group is for share_replicated",
    ),
    "no ranks": (wrong(share_replicated=True), "share_replicated needs ranks"),
    "split": (wrong(split={"layers.0": (3, 4)}), r"layers\.0\.weight has 8 rows"),
    "flatten of nothing": (
        wrong(flatten={"conv3*": True}),
        "conv3. matches none of the 1 parameters of more than two",
    ),
    "split of nothing": (wrong(split={"qkv": (3,)}), "split qkv matches none of Muon's 2 matrices"),
    **{
        f"split by {rows!r}": (
            wrong(split={"layers.0": rows}),
            r"^split: 'layers\.0' has .*; give whole numbers of rows",
        )
        for rows in (4.0, (True, 7), "24", None)
    },
    "norms and decay": (
        wrong(hyperball=True),
        "weight decay 0.1 of .* has no effect with MuonHyperball",
    ),
    "norms and moments": (
        wrong(**HYPERBALL, moment2_method="normuon"),
        "hyperball=True is not supported with moment2",
    ),
    "norms and signs": (
        wrong(**HYPERBALL, cautious_weight_decay=True),
        "cautious_weight_decay=True has no effect",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_by_name(case: str) -> None:
    act, message = WRONG[case]
    with pytest.raises((TypeError, UserError), match=message):
        act()


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_frozen_weights_may_have_any_dtype(dtype: torch.dtype) -> None:
    """As of the base model under LoRA: fp16, or codes of a quantization."""
    base = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    assert select([("base", base), ("lora", ONE)]).frozen == {base: "base"}


@pytest.fixture
def four_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def sharded(shape: tuple[int, ...], mesh: Any, placement: Any) -> nn.Parameter:
    local = torch.empty(shape)
    local = local if isinstance(placement, Partial) else local.chunk(4, placement.dim)[0]
    stride = torch.empty(shape).stride()
    return nn.Parameter(
        DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )
    )


def test_fsdps_cpu_offload_is_refused(four_ranks: None) -> None:
    """Its parameters lie on the CPU, and their mesh is the GPUs'."""
    like = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cuda", (4,)), (Shard(0),), like)
    with pytest.raises(
        UserError, match=r"w lies on cpu and its mesh on cuda, .* give Muon offload='cpu'"
    ):
        megatron_muon.Muon(
            [("w", nn.Parameter(DTensor(torch.empty(2, 4), spec, requires_grad=False)))]
        )


def test_dtensors_that_muon_cannot_take_are_refused_by_name(four_ranks: None) -> None:
    row, elsewhere = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 2])
    apart = DTensor.from_local(torch.ones(4, 4), elsewhere, [Shard(0)], run_check=False)
    scattered = sharded((8, 3, 3), row, _StridedShard(0, split_factor=2))
    for parameters, arguments, message in (
        ([("w", sharded((8, 4), row, Partial()))], {}, r"w has unreduced values"),
        (
            [("w", nn.Parameter(apart))],
            {},
            r"w is on DeviceMesh.*, which rank 0 is not in; give Muon on each rank",
        ),
        (
            [("experts.w", scattered)],
            {},
            r"experts.w \(8, 3, 3\) is sharded as \(_S.*, which does not give each rank one block",
        ),
        (
            [("w", sharded((4, 8, 3), row, Shard(1)))],
            {"flatten": {"w": True}},
            r"w \(4, 8, 3\) is sharded along a dim",
        ),
    ):
        with pytest.raises(UserError, match=message):
            megatron_muon.Muon(parameters, **arguments)
