"""Which parameters `megatron_muon.Muon` takes, and which it refuses, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_muon
from megatron_muon.errors import UserError
from megatron_muon.fsdp.selection import select
from tests.support.small_model import Model


def test_who_takes_what_can_be_read_and_changed() -> None:
    model = Model()
    table = megatron_muon.Muon(model.named_parameters()).table()
    assert re.search(r"^muon +2 +96 +\d+\.\d%", table, re.MULTILINE)
    assert re.search(r"^adamw +1 +10 x 6  embed_tokens\.weight \(embedding\)$", table, re.MULTILINE)
    assert re.search(r"^adamw +1 +scalar  scale \(0D; no weight decay\)$", table, re.MULTILINE)

    def taken(**given: Any) -> list[str]:
        selection = select(model.named_parameters(), **given)
        return [choice.name for choice in selection.matrices.values()]

    assert taken() == ["layers.0.weight", "layers.1.weight"]
    assert taken(matrices=["layers.*.weight", "lm_head"]) == [
        "layers.0.weight",
        "layers.1.weight",
        "lm_head.weight",
    ]
    assert taken(matrices=lambda name, p: p.shape == (6, 8)) == ["layers.1.weight"]
    assert taken(exclude=["layers.0"]) == ["layers.1.weight"]


LEFT = """
    layers.0.cls_token register_tokens layers.0.rel_pos_h codebook shared.weight model.shared.weight
    encoder.layers.0.attention.relative_attention_bias.weight tok_emb.weight to_logits.weight
    v_head.summary.weight generator.weight generator.proj.weight
"""
TAKEN = """
    layers.0.fc1.weight encoder.layer.0.output.dense.weight h.3.attn.c_proj.weight
    shared_experts.up_proj.weight generator.fc1.weight
"""


def test_names_of_tables_outputs_and_matrices() -> None:
    names = [*LEFT.split(), *TAKEN.split()]
    selection = select([(name, of(3, 4)) for name in names])
    assert [choice.name for choice in selection.matrices.values()] == TAKEN.split()


def wrong(**given: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(Model().named_parameters(), **given)


def groups(*members: Any) -> Callable[[], Any]:
    return lambda: megatron_muon.Muon(list(members))


ONE = nn.Parameter(torch.ones(3, 4))


def of(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape).to(dtype))


def flat(mark: str) -> Any:
    """A vector with the attribute by which a library marks it."""
    parameter = of(24)
    setattr(parameter, mark, 0)
    return "layers.7.weight", parameter


class Quantized(torch.Tensor):
    """A wrapper subclass that torch dispatches to, as torchao's are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        assert func == torch.ops.aten.detach.default
        return Quantized(args[0].codes)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a module in a list": (groups(Model()), r"is a Model, not a tensor; pass model\.named_param"),
    "nothing": (lambda: megatron_muon.Muon([]), "params is empty"),
    "1D without names": (groups(ONE, of(3)), r"parameter 1 has shape \(3,\)"),
    "4D by pattern": (wrong(matrices=["conv.weight"]), "only parameters that are not among these"),
    "a kernel by group": (
        groups(
            {"params": [("w", of(8, 3, 5, 5))], "optimizer": "muon"},
        ),
        r"w has shape \(8, 3, 5, 5\); .* if it is a convolution or in",
    ),
    "twice": (groups(("a", ONE), ("b", ONE)), "b is given twice"),
    "fp16": (groups(("a", of(3, 3, dtype=torch.float16))), "a is of torch.float16.*: use bf16"),
    "FSDP1": (groups(("a", ONE), flat("_is_flat_param")), "is a FlatParameter of FSDP1; .*FSDP2"),
    "ZeRO-3": (groups(("a", ONE), flat("ds_id")), "is partitioned by DeepSpeed's ZeRO-3; Muon"),
    "quantized": (groups(("a", Quantized(ONE).requires_grad_())), "a is a Quantized; .* freeze it"),
    "another optimizer": (
        groups({"params": [ONE], "optimizer": "lion"}),
        "choose 'muon' or 'adamw'",
    ),
    "a key of others": (
        groups({"params": [ONE], "use_muon": False}),
        "group 0 has use_muon=False, which has no effect; it may have lr, .*, optimizer",
    ),
    "AdamW's betas for Muon": (
        groups({"params": [ONE], "optimizer": "muon", "betas": (0.9, 0.9)}),
        r"has betas=\(0.9, 0.9\), which has no effect; it may have lr, weight_decay, momentum, opt",
    ),
    "a group's betas": (
        groups({"params": [ONE], "betas": (2.0, 0.9)}),
        r"betas\[0\] of parameter group 0 2 is out",
    ),
    "a group's lr": (
        groups({"params": [ONE], "lr": -1.0}),
        "lr of parameter group 0 -1 is out of range",
    ),
    "blown up": (wrong(ns_coefficients=(2.0, 0.0, 0.0)), "singular values between"),
    "a pattern of nothing": (wrong(exclude=["router"]), "^exclude router matches none of Muon's 2"),
    "a graph on a CPU": (wrong(cuda_graph=True), "cuda_graph=True needs a GPU, not cpu"),
    "no folder": (wrong(offload="nvme"), "offload='nvme' and offload_dir belong together"),
    "split": (wrong(split={"layers.0": (3, 4)}), r"layers\.0\.weight has 8 rows, which \(3, 4\)"),
    "split into nothing": (wrong(split={"layers.0": ()}), "give whole numbers of rows"),
    "split by a float": (wrong(split={"layers.0": 4.0}), "give whole numbers of rows"),
    "flatten of nothing": (wrong(flatten={"conv3*": True}), "matches none of the 1 parameters of"),
    "norms and decay": (
        wrong(hyperball=True),
        "weight_decay of .* 0.1 has no effect with MuonHyperball",
    ),
    "norms and moments": (
        wrong(hyperball=True, moment2_method="normuon"),
        "moment2_method='normuon' is not supported with hyperball=True",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_by_name(case: str) -> None:
    act, message = WRONG[case]
    with pytest.raises((TypeError, UserError), match=message):
        act()


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
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
    whole = torch.empty(shape)
    local = whole.chunk(4, placement.dim)[0]
    options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], **options))


def test_fsdps_cpu_offload_is_refused(four_ranks: None) -> None:
    """Its parameters lie on the CPU, and their mesh is the GPUs'."""
    like = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cuda", (4,)), (Shard(0),), like)
    p = nn.Parameter(DTensor(torch.empty(2, 4), spec, requires_grad=False))
    with pytest.raises(UserError, match=r"w is on cpu and its mesh on cuda, .* use offload='cpu'"):
        megatron_muon.Muon([("w", p)])


def test_dtensors_that_muon_cannot_take_are_refused_by_name(four_ranks: None) -> None:
    row = init_device_mesh("cpu", (4,))
    given = [
        (
            "experts.w",
            sharded((8, 3, 3), row, _StridedShard(0, split_factor=2)),
        )
    ]
    with pytest.raises(ValueError, match=r"experts.w"):
        megatron_muon.Muon(given)
    given = [("w", sharded((4, 8, 3), row, Shard(1)))]
    with pytest.raises(UserError, match=r"w \(4, 8, 3\) is sharded along a dim"):
        megatron_muon.Muon(given, flatten={"w": True})
    partial = DTensor.from_local(torch.empty(8, 4), row, [Partial()], run_check=False)
    with pytest.raises(UserError, match="w has unreduced values"):
        megatron_muon.Muon([("w", nn.Parameter(partial))])
