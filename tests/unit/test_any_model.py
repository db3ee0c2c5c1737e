"""`megatron_muon.Muon` in one process: equal to torch.optim's, which parameters it takes, what it refuses."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import _muon as torch_muon
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_muon
from megatron_muon.core.errors import UserError
from megatron_muon.fsdp.selection import select
from megatron_muon.offload.run import close_runs

SHAPES = [(24, 40), (40, 24), (16, 16), (1, 7), (5, 1)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 6)
        self.conv = nn.Conv2d(1, 2, 3)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])
        self.scale = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(6, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return self.lm_head(x * self.scale).square().mean()


def trained(optimizer: torch.optim.Optimizer, steps: int = 10) -> list[torch.Tensor]:
    """The parameters of an optimizer after steps with gradients from a seed."""
    generator = torch.Generator().manual_seed(7)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.fixture
def torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon always iterates in bf16; its own source in fp32."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    names = dict(vars(torch_muon))
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"])


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("ns", ["standard", "gram"])
def test_ten_steps_are_those_of_torch_in_fp32(
    torch_in_fp32: None, adjust_lr_fn: str | None, nesterov: bool, weight_decay: float, ns: str
) -> None:
    """Products are formed in another order: 1e-6 of weights of size 1 to 4, which move by 0.02 to 0.2 a step."""
    given = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "weight_decay": weight_decay}
    expected = trained(torch.optim.Muon(matrices(), **given))
    found = trained(megatron_muon.Muon(matrices(), **given, fp32_matmul_prec="highest", ns=ns))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_ten_steps_are_those_of_torch_in_bf16() -> None:
    """As both come: bf16 rounds an update by up to 0.01 of its size, at other places in each."""
    start = matrices()
    expected = trained(torch.optim.Muon(matrices(), lr=0.02))
    found = trained(megatron_muon.Muon(matrices(), lr=0.02))
    for p, one, other in zip(start, found, expected, strict=True):
        moved = (other - p).norm()
        assert (one - other).norm() < 0.02 * moved


def test_defaults_are_those_of_torch() -> None:
    ours = inspect.signature(megatron_muon.Muon).parameters
    for name, parameter in inspect.signature(torch.optim.Muon).parameters.items():
        assert ours[name].default == parameter.default, name


def test_eps_means_what_it_means_in_torch(torch_in_fp32: None) -> None:
    """Momentum far smaller than eps makes a small update."""
    updates = []
    for make in (torch.optim.Muon, megatron_muon.Muon):
        for size in (1e-10, 1e-4):
            p = nn.Parameter(torch.zeros(6, 8))
            more = {"fp32_matmul_prec": "highest"} if make is megatron_muon.Muon else {}
            optimizer = make([p], lr=1.0, eps=1e-6, **more)
            p.grad = size * torch.eye(6, 8)
            optimizer.step()
            updates.append(p.detach().clone())
    for one, other in zip(updates[:2], updates[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
    assert updates[2].abs().max() < 0.1 < 0.5 < updates[3].abs().max()


def test_coefficients_of_ones_own(torch_in_fp32: None) -> None:
    coefficients = (3.0, -3.2, 1.2)
    given = {"lr": 0.02, "ns_coefficients": coefficients, "ns_steps": 7}
    expected = trained(torch.optim.Muon(matrices(), **given))
    found = trained(megatron_muon.Muon(matrices(), **given, fp32_matmul_prec="highest"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    for bad in ((2.0, 0.0, 0.0), (-3.4445, 4.775, -2.0315)):
        with pytest.raises(UserError, match="singular values between"):
            megatron_muon.Muon(matrices(), ns_coefficients=bad)


def test_the_rest_is_torchs_adamw() -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, adamw_lr=1e-2, adamw_weight_decay=0.3)
    names = [name for name, p in model.named_parameters() if p in optimizer.selection.why]
    rest = [p for name, p in twin.named_parameters() if name in names]
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            other.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
    assert names == ["scale", "embed_tokens.weight", "conv.weight", "conv.bias", "layers.0.bias", "layers.1.bias",
                     "lm_head.weight"]  # fmt: skip
    for name in names:
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name), rtol=0.0, atol=0.0)


def test_who_takes_what_can_be_read_and_changed() -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    table = optimizer.table()
    for line in (
        r"muon +2 +96 +\d+\.\d%",
        r"muon +8 x 6  layers\.0\.weight$",
        r"adamw +10 x 6  embed_tokens\.weight \(embedding\)$",
        r"adamw +10 x 6  lm_head\.weight \(output layer\)$",
        r"adamw +2 x 1 x 3 x 3  conv\.weight \(4D\)$",
        r"adamw +scalar  scale \(0D\)$",
    ):
        assert re.search("^" + line, table, re.MULTILINE), (line, table)

    def taken(**given: Any) -> list[str]:
        selection = select(model.named_parameters(), **given)
        return [selection.names[p] for group in selection.muon for p in group["params"]]

    assert taken() == ["layers.0.weight", "layers.1.weight"]
    assert taken(matrices=["layers.*.weight", "lm_head"]) == ["layers.0.weight", "layers.1.weight", "lm_head.weight"]
    assert taken(matrices=lambda name, p: p.shape == (6, 8)) == ["layers.1.weight"]
    assert taken(exclude=["layers.0"]) == ["layers.1.weight"]


def test_groups_keep_their_settings() -> None:
    model = Model()
    head = {"params": [("head", model.lm_head.weight)], "optimizer": "muon", "lr": 0.5}
    rest = {"params": [item for item in model.named_parameters() if item[0] != "lm_head.weight"], "weight_decay": 0.7}
    optimizer = megatron_muon.Muon([head, rest], lr=0.02, adamw_lr=1e-3, weight_decay=0.1)
    found = [
        (group["optimizer"], len(group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [("muon", 1, 0.5, 0.1), ("muon", 2, 0.02, 0.7), ("adamw", 6, 1e-3, 0.7)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.arange(4)).backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.01, 5e-4]


def test_it_is_an_optimizer_as_torchs_are() -> None:
    """Closures, hooks, clipping, schedulers that change momentum, learning rates that are tensors."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=torch.tensor(0.02))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    first = optimizer.step(closure)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)
    assert optimizer.step(closure) < first
    schedule.step()
    assert called == ["before", "after"] * 2
    assert "lr: " in repr(optimizer)


def test_a_parameter_without_gradient_is_passed_over() -> None:
    """As in torch.optim: no decay, no momentum, no count; and the others go on."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1, moment2_method="normuon")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    untouched = {model.layers[0].weight, model.lm_head.weight}
    before = {p: p.detach().clone() for p in model.parameters()}
    state = {p: {slot: value.clone() for slot, value in optimizer.state[p].items()} for p in model.parameters()}
    for p in model.parameters():
        p.grad = None if p in untouched else 2 * torch.ones_like(p)
    optimizer.step()
    for p in model.parameters():
        assert torch.equal(p, before[p]) is (p in untouched)
        for slot, value in optimizer.state[p].items():
            assert torch.equal(value, state[p][slot]) is (p in untouched), slot


def test_a_gradient_that_is_not_finite_changes_its_matrix_not_at_all() -> None:
    """Momentum would stay NaN for ever."""
    for settings in ({}, {"nesterov": False}, {"momentum_dtype": "bf16"}):
        p, other = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))
        optimizer = megatron_muon.Muon([p, other], lr=0.1, **settings)
        p.grad, other.grad = torch.full((4, 4), math.inf), torch.ones(4, 4)
        optimizer.step()
        assert torch.equal(p, torch.eye(4))
        assert not torch.equal(other, torch.eye(4))
        assert optimizer.skipped_updates() == {"parameter 0": 1}
        p.grad = torch.ones(4, 4)
        optimizer.step()
        assert not torch.equal(p, torch.eye(4))
        assert p.isfinite().all()


def test_state_that_is_missing_or_frozen_later() -> None:
    """AdamW's state of a new head starts at zero; a layer frozen after construction keeps what it has."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    trained(optimizer, steps=2)
    saved = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    position = next(place for place, p in enumerate(ordered) if p is model.lm_head.weight)
    del saved["state"][position], saved["state"][0]
    model.layers[0].weight.requires_grad_(False)
    momentum = optimizer.state[model.layers[0].weight]["momentum_buffer"].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.layers[0].weight]["momentum_buffer"], momentum)
    assert not optimizer.state[model.lm_head.weight]["exp_avg"].any()
    trained(optimizer, steps=1)


def test_a_state_of_torchs_muon_goes_on() -> None:
    """Its groups lack keys of ours."""
    before = torch.optim.Muon(matrices(), lr=0.02)
    trained(before, steps=2)
    optimizer = megatron_muon.Muon(matrices(), lr=0.5)
    optimizer.load_state_dict(before.state_dict())
    trained(optimizer, steps=1)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_copying_is_refused() -> None:
    with pytest.raises(TypeError, match="make another one and give it the state_dict"):
        copy.deepcopy(megatron_muon.Muon(matrices()))


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


def test_a_first_step_without_any_gradient_warns() -> None:
    optimizer = megatron_muon.Muon(Model().named_parameters())
    with pytest.warns(UserWarning, match="was the model sharded after the optimizer was made"):
        optimizer.step()


def test_frozen_parameters_have_no_state() -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(model.named_parameters())
    assert model.layers[0].weight not in optimizer.state
    assert optimizer.selection.frozen == ["layers.0.weight", "layers.0.bias"]
    assert re.search(r"^frozen +2$", optimizer.table(), re.MULTILINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}, {"moment2_method": "adamuon"}])
def test_state_dicts_go_on_as_if_nothing_had_happened(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Also of bf16 parameters, whose momentum torch's own loading would round to bf16."""

    def made() -> tuple[Model, megatron_muon.Muon]:
        torch.manual_seed(0)
        model = Model().to(dtype)
        return model, megatron_muon.Muon(model.named_parameters(), **settings)

    def steps(model: Model, optimizer: megatron_muon.Muon, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()

    whole, optimizer = made()
    steps(whole, optimizer, range(6))
    first, optimizer = made()
    steps(first, optimizer, range(3))
    second, again = made()
    second.load_state_dict(first.state_dict())
    again.load_state_dict(optimizer.state_dict())
    steps(second, again, range(3, 6))
    for name, p in whole.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
    other = megatron_muon.Muon(second.named_parameters(), moment2_method="normuon")
    with pytest.raises(UserError, match=r"has (no|\(8, 6\)) moment2_buffer of layers\.0\.weight"):
        other.load_state_dict(optimizer.state_dict())


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
    "integers": (groups(("a", nn.Parameter(torch.ones(3, 3).int(), False))), UserError, "a is of torch.int32"),
    "complex": (groups(("a", nn.Parameter(torch.ones(3, 3).cfloat()))), UserError, "a is of torch.complex64"),
    "another optimizer": (groups({"params": [ONE], "optimizer": "lion"}), UserError, "choose 'muon' or 'adamw'"),
    "a group's steps": (
        groups({"params": [ONE], "ns_steps": 3}),
        UserError,
        "sets ns_steps, which holds for the whole",
    ),
    "another Muon's group": (groups({"params": [ONE], "use_muon": False}), UserError, "use_muon=False, as of another"),
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
        r"^exclude router matches none of Muon's 2 matrices; the nearest names are layers\.0\.weight$",
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
    "adjust_lr_fn": (wrong(adjust_lr_fn="max"), UserError, "adjust_lr_fn='max' does not exist"),
    "unproven": (wrong(ns_coefficients="cans"), UserError, "^ns_coefficients cans is not stable with fp32_matmul_prec"),
    "no folder": (wrong(offload="nvme"), UserError, "offload='nvme' and offload_dir belong together"),
    "a group's lr": (groups({"params": [ONE], "lr": -1.0}), UserError, "lr of parameter group 0 -1 is out of range"),
    "a group that is not shared": (wrong(process_group=object()), UserError, "process_group is for share_replicated"),
    "no ranks": (wrong(share_replicated=True), UserError, "share_replicated needs ranks"),
    "split": (wrong(split={"layers.0": (3, 4)}), UserError, r"layers\.0\.weight has 8 rows"),
    "split of nothing": (wrong(split={"qkv": (3,)}), UserError, "split qkv matches none of Muon's 2 matrices"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_by_name(case: str) -> None:
    act, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        act()


def test_parameters_cannot_be_added_or_moved_later() -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    with pytest.raises(UserError, match="give it all parameters then"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    weight = model.layers[0].weight
    weight.data = weight.data[:4]
    with pytest.raises(UserError, match=r"layers\.0\.weight was \(8, 6\) on cpu when the optimizer was made"):
        optimizer.step()


def test_momentum_on_disk_in_one_process(tmp_path: Path) -> None:
    """Without torch.distributed; the updates are the same, and the files go."""
    elsewhere = megatron_muon.Muon(matrices(), offload="nvme", offload_dir=str(tmp_path))
    for one, other in zip(trained(elsewhere), trained(megatron_muon.Muon(matrices())), strict=True):
        assert torch.equal(one, other)
    (file,) = tmp_path.glob("muon-momentum-*-dense0.bin")
    close_runs()
    assert not file.exists()


def test_measured_steps() -> None:
    optimizer = megatron_muon.Muon(matrices(), metrics_interval=5)
    trained(optimizer, steps=4)
    assert optimizer.metrics.latest is None
    trained(optimizer, steps=1)
    measured = optimizer.metrics.latest
    assert measured.step == 5
    assert 0.0 < measured.values["orthogonality_error"] < 2.0
    assert measured.values["update_rms"] > 0.0


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
