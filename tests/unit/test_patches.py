"""Every patch of megatron-core does its work, fails loudly where what it patches has changed, and
can be undone.
"""

import argparse
import contextlib
import functools
import sys
import types

import megatron.core.optimizer as optimizers
import megatron.core.tensor_parallel.layers as tensor_parallel_layers
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.transformer.fsdp_dtensor_checkpoint as handlers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.datasets import utils as dataset_utils
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
    ParamAndGradBuffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training import arguments, checkpointing, training
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_muon.errors import UserError
from megatron_muon.megatron.checkpoint import loading, saving
from megatron_muon.megatron.patches import install as mcore_patches

FOLLOWED = [
    (arguments, "add_megatron_arguments"),
    (arguments, "validate_args"),
    (optimizers, "_get_megatron_emerging_optimizer"),
    (training, "clip_qk"),
]
OF_EVERY_RUN = [  # progress watches any optimizer; none runs what pickles name
    (dataset_utils, "compile_helpers"),
    (training, "get_megatron_optimizer"),
    (checkpointing, "_load_base_checkpoint"),
    (FileSystemReader, "read_metadata"),
    (DefaultLoadPlanner, "load_bytes"),
]
UNDER_FSDP = [
    (checkpointing, "handle_swiglu_in_state_dict"),
    (tensor_parallel_layers, "reduce_from_tensor_model_parallel_region"),
]
OF_MUON = [
    (ParamAndGradBuffer, "reduce_scatter_gradients"),
]
PATCHED = [*FOLLOWED, *OF_EVERY_RUN, *UNDER_FSDP, *OF_MUON]
MUON = "--optimizer muon --use-megatron-fsdp"


@pytest.mark.parametrize(
    ("flags", "every_run", "expected"),
    [
        (MUON, False, PATCHED),
        ("--use-megatron-fsdp", False, FOLLOWED),
        ("--optimizer muon", False, FOLLOWED),
        ("--use-megatron-fsdp", True, [*FOLLOWED, *OF_EVERY_RUN, *UNDER_FSDP]),
        ("", True, [*FOLLOWED, *OF_EVERY_RUN]),
    ],
)
def test_a_run_gets_its_patches_and_undo_restores_the_very_objects(
    patches, monkeypatch, capsys, flags, every_run, expected
):
    before = [getattr(owner, name) for owner, name in PATCHED]

    def changed():
        return [
            each for each, was in zip(PATCHED, before, strict=True) if getattr(*each) is not was
        ]

    mcore_patches.follow(patches, every_run=every_run)
    assert changed() == FOLLOWED
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
    for _ in range(2):  # Megatron parses again for some of its features
        arguments.parse_args()
    assert changed() == expected
    assert capsys.readouterr().out.count("megatron-muon: patched for this run: ") == (
        expected != FOLLOWED
    )
    patches.undo()
    assert changed() == []


def other(*_args: object) -> None:
    """A function that takes nothing by the names that patches rely on."""


use_factory = functools.partial(mcore_patches.use_factory, given={})
OTHER_SIGNATURE = [
    (mcore_patches.follow, arguments, "add_megatron_arguments"),
    (use_factory, optimizers, "_get_megatron_emerging_optimizer"),
    (use_factory, training, "clip_qk"),
    (mcore_patches.accept_muon, arguments, "validate_args"),
    (
        mcore_patches.let_experts_have_biases,
        tensor_parallel_layers,
        "reduce_from_tensor_model_parallel_region",
    ),
    (saving.split_swiglu, checkpointing, "handle_swiglu_in_state_dict"),
    (saving.save_beside_and_rename, dcp, "save"),
    (saving.explain_failed_saves, training, "save_checkpoint"),
    (saving.try_saving_before_training, training, "train"),
    (loading.load_what_is_there, checkpointing, "_load_base_checkpoint"),
    (loading.load_what_is_there, checkpointing, "preprocess_fsdp_dtensor_state_dict"),
]
OTHER_CODE = [
    (saving.split_swiglu, handlers, "make_fsdp_dtensor"),
    (saving.write_tracker_at_once, checkpointing, "save_checkpoint"),
]
ABSENT = [(mcore_patches.use_shipped_dataset_helper, dataset_utils, "compile_helpers")]

BEFORE = {
    "preprocess_fsdp_dtensor_state_dict": 1,
    "handle_swiglu_in_state_dict": 1,
    "clip_qk": 1,
    "add_megatron_arguments": 3,
}
"""What the patch of each has replaced before."""


@pytest.mark.parametrize(
    ("patch", "owner", "name", "why"),
    [
        *(
            (*case, r"cannot patch .*{name}: it accepts _args, without .*")
            for case in OTHER_SIGNATURE
        ),
        *((*case, "{name}.*") for case in OTHER_CODE),
    ],
)
def test_what_has_another_shape_is_not_patched(patches, monkeypatch, patch, owner, name, why):
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(RuntimeError, match=why.format(name=name) + r"megatron-core 0\.19"):
        patch(patches)
    assert getattr(owner, name) is other


@pytest.mark.parametrize(("patch", "owner", "name"), [*OTHER_SIGNATURE, *ABSENT])
def test_what_is_gone_is_named(patches, monkeypatch, patch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        RuntimeError,
        match=rf"cannot patch .*{name}: there is no such attribute.*megatron-core 0\.19",
    ):
        patch(patches)
    assert len(patches._exit_callbacks) == BEFORE.get(name, 0)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_compiled_helper_is_used_and_built_only_where_it_is_missing(
    patches, monkeypatch, is_there
):
    """The wheel of megatron-core has no Makefile: building would end the run."""
    built = []

    def find(name):
        if not is_there:
            raise ImportError(name)

    monkeypatch.setattr(dataset_utils, "compile_helpers", lambda: built.append("built"))
    monkeypatch.setattr(mcore_patches.importlib, "import_module", find)
    mcore_patches.use_shipped_dataset_helper(patches)
    dataset_utils.compile_helpers()
    assert built == ([] if is_there else ["built"])


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_validation_sees_adam_and_no_logits_of_local_attention(
    patches, monkeypatch, refused, implementation
):
    """Also where validation ends in an error: the caller's arguments must not say so then."""
    seen = []

    def validate_args(args, defaults):
        seen.append((args.optimizer, args.qk_clip, args.log_max_attention_logit))
        if refused:
            raise AssertionError("refused")

    monkeypatch.setattr(arguments, "validate_args", validate_args)
    mcore_patches.accept_muon(patches)
    given = {
        "optimizer": "muon",
        "use_megatron_fsdp": True,
        "transformer_impl": implementation,
        "muon_exchange": "owner",
    }
    given |= {"qk_clip": True, "log_max_attention_logit": True}
    args = argparse.Namespace(**given)
    with pytest.raises(AssertionError) if refused else contextlib.nullcontext():
        arguments.validate_args(args)
    assert seen == [("adam", *(implementation != "local",) * 2)]
    assert vars(args) == given


def test_who_calls_megatrons_factory_gets_ours_with_the_settings_of_flags(patches, monkeypatch):
    """Also a caller that imported it by name before; so did Megatron-Bridge what its checkpoints
    split SwiGLU with.

    A config of megatron-core's own class ended in a TypeError.
    """
    called, bridge = {}, types.ModuleType("bridge")
    bridge.handle = handlers.handle_swiglu_in_state_dict
    monkeypatch.setitem(sys.modules, "bridge", bridge)

    def factory(config, model_chunks, config_overrides=None, pg_collection=None):
        called.update(config=config, chunks=model_chunks, overrides=config_overrides)
        return optimizer

    def chunk(**config):
        return types.SimpleNamespace(
            ddp_config=types.SimpleNamespace(**config), named_parameters=lambda: 1 / 0
        )

    optimizer = types.SimpleNamespace(qk_clip=types.SimpleNamespace(largest=torch.tensor(7.0)))
    monkeypatch.setattr("megatron_muon.megatron.factory.get_megatron_muon_optimizer", factory)
    mcore_patches.use_factory(patches, {"muon_exchange": "allgather", "muon_lr": 3.0})
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    config.muon_lr = 2.0  # as a program sets it that has no flags
    with pytest.raises(ZeroDivisionError):  # Megatron's own goes through the parameters
        get_megatron_optimizer(config, [chunk(use_megatron_fsdp=False)], {}, pg_collection=True)
    assert bridge.handle is handlers.handle_swiglu_in_state_dict
    sharded = chunk(use_megatron_fsdp=True)
    assert get_megatron_optimizer(config, [sharded], {}) is optimizer
    assert training.clip_qk([sharded], log_max_only=True) is optimizer.qk_clip.largest, (
        "what the step has measured"
    )
    assert (
        bridge.handle
        is checkpointing.handle_swiglu_in_state_dict
        is not handlers.handle_swiglu_in_state_dict
    )
    assert called["chunks"] == [sharded]
    settings = called["config"]
    assert (settings.lr, settings.muon_lr, settings.muon_exchange) == (0.1, 2.0, "allgather")
    assert settings.muon_tp_mode == config.muon_tp_mode == "blockwise"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--muon-exchange allgather", "--muon-exchange needs --optimizer muon --use-megatron-fsdp"),
        (
            "--use-megatron-fsdp --no-verify-checkpoint",
            "--no-verify-checkpoint needs --optimizer muon",
        ),
        (f"{MUON} --muon-ns-device cpu", "--muon-ns-device needs --muon-offload cpu or nvme"),
        (f"{MUON} --muon-exchange-buffer-mb nan", "--muon-exchange-buffer-mb nan is not finite"),
        (
            f"{MUON} --pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 2 does not work",
        ),
    ],
)
def test_a_flag_that_would_do_nothing_is_one_line_as_soon_as_it_is_read(
    patches, monkeypatch, flags, says
):
    mcore_patches.follow(patches)
    monkeypatch.setattr(sys, "argv", ["script.py", *flags.split()])
    with pytest.raises(UserError) as error:
        arguments.parse_args()
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_what_a_module_imported_by_name_is_patched_too(patches, monkeypatch):
    """`from megatron.training.arguments import validate_args` before `enable` kept the function
    that refuses Muon.
    """
    script = types.ModuleType("script")
    script.check, script.own = arguments.validate_args, other
    monkeypatch.setitem(sys.modules, "script", script)
    mcore_patches.follow(patches)
    assert script.check is arguments.validate_args
    assert script.own is other
    with pytest.raises(
        UserError, match=r"^--optimizer muon: its flags were parsed without .*enable\(\) earlier"
    ):
        script.check(argparse.Namespace(optimizer="muon", use_megatron_fsdp=True))
    patches.undo()
    assert script.check is arguments.validate_args


def test_a_bias_is_added_in_place_to_what_one_rank_has(patches, monkeypatch):
    """autograd refused it, and experts with biases ended in a RuntimeError where nothing is
    parallel.
    """
    one = types.SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(mappings, "get_tensor_model_parallel_group_if_none", lambda group: group)

    def with_bias():
        weight = torch.ones(2, requires_grad=True)
        output = tensor_parallel_layers.reduce_from_tensor_model_parallel_region(
            weight * 2, group=one
        )
        output += 1
        output.sum().backward()
        return weight.grad

    with pytest.raises(RuntimeError, match="modified inplace"):
        with_bias()
    mcore_patches.let_experts_have_biases(patches)
    assert with_bias().tolist() == [2.0, 2.0]


class Layer(torch.nn.Module):
    """A model whose parameters have the names that Megatron-FSDP's wrappers give them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_moe_experts=None)
        self.module = torch.nn.ModuleDict(
            {name: torch.nn.Linear(2, 4) for name in ("fc1", "proj", "norm")}
        )


def handle_swiglu(model, model_state_dict, optimizer_state_dict):
    """As 0.19's handler: splits every fc1 of the weights, and Adam's two slots of its state, into
    `_w` and `_v`.
    """
    split = {}
    for key, value in model_state_dict.items():
        if "fc1" not in key:
            split[key] = value
            continue
        assert model.get_parameter(f"module.module.{key}").shape == value.shape
        split |= {f"{key}_w": value[:2], f"{key}_v": value[2:]}
    if optimizer_state_dict is None:
        return split, None
    state = {}
    for key, slots in optimizer_state_dict["state"].items():
        if "fc1" not in key:
            state[key] = slots
            continue
        for half, rows in (("_w", slice(0, 2)), ("_v", slice(2, 4))):
            state[key + half] = {
                **slots,
                **{slot: slots[slot][rows] for slot in ("exp_avg", "exp_avg_sq")},
            }
    return split, {**optimizer_state_dict, "state": state}


@pytest.fixture
def handler(patches, monkeypatch):
    monkeypatch.setattr(checkpointing, "handle_swiglu_in_state_dict", handle_swiglu)
    saving.split_swiglu(patches)
    return checkpointing.handle_swiglu_in_state_dict


ADAM = {"exp_avg": (4,), "exp_avg_sq": (4,), "step": ()}


@pytest.mark.parametrize(
    ("parameter", "slots", "whole"),
    [
        # AdaMuon's is split as momentum is
        ("weight", {"momentum_buffer": (4, 2), "moment2_buffer": (4, 2)}, None),
        # NorMuon's, by rows
        ("weight", {"momentum_buffer": (4, 2), "moment2_buffer": (4, 1)}, "moment2_buffer"),
        ("bias", ADAM, None),
        ("bias", {"exp_avg": (4,), "step": ()}, None),
        ("bias", {**ADAM, "master_param": (4,)}, None),
    ],
)
def test_every_slot_of_the_weights_shape_is_split(handler, parameter, slots, whole):
    """The handler hard-codes exp_avg and exp_avg_sq: the first save of Muon or Lion was a
    KeyError.
    """
    kept = {slot: torch.rand(shape) for slot, shape in slots.items()}
    state = {f"module.fc1.{parameter}": kept, "module.proj.weight": kept}
    given = {"state": state, "param_to_group_meta": {"module.fc1.weight": {"lr": 0.1}}}
    weights, found = handler(Layer(), {"fc1.weight": torch.zeros(4, 2)}, given)
    assert set(weights) == {"fc1.weight_w", "fc1.weight_v"}
    assert found["param_to_group_meta"] == given["param_to_group_meta"]
    assert set(state[f"module.fc1.{parameter}"]) == set(slots)  # the caller's state is unchanged
    split = found["state"]
    assert split.pop("module.proj.weight") == kept
    gate, up = (split.pop(f"module.fc1.{parameter}{half}") for half in ("_w", "_v"))
    assert split == {}
    assert gate.keys() == kept.keys()
    assert up.keys() == kept.keys() - {whole}
    for slot, tensor in kept.items():
        if slot == whole:  # one number for each row stays beside the gate
            assert gate[slot] is tensor
        elif tensor.ndim == 0:
            assert gate[slot] == up[slot] == tensor
        else:
            assert torch.equal(torch.cat([gate[slot], up[slot]]), tensor)
