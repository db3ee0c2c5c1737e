"""Every patch of megatron-core does its work, fails loudly where what it patches has changed, and
can be undone.
"""

import argparse
import sys
import types

import megatron.core.optimizer as optimizers
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
from megatron_muon.megatron.checkpoint import saving
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


def test_a_function_of_another_shape_is_not_patched(patches, monkeypatch):
    """Those of Megatron: test_upstream.py."""
    monkeypatch.setattr(dcp, "save", other)
    why = r"cannot patch .*save: it accepts _args, without .*megatron-core 0\."
    with pytest.raises(RuntimeError, match=why):
        saving.save_beside_and_rename(patches)
    assert dcp.save is other


def test_a_function_that_is_gone_is_named(patches, monkeypatch):
    monkeypatch.delattr(dataset_utils, "compile_helpers")
    with pytest.raises(
        RuntimeError, match=r"cannot patch .*compile_helpers: there is no such attr"
    ):
        mcore_patches.use_shipped_dataset_helper(patches)


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


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_validation_sees_adam_and_no_logits_of_local_attention(
    patches, monkeypatch, implementation
):
    """Also where validation ends in an error: the caller's arguments must not say so then."""
    seen = []

    def validate_args(args, defaults):
        seen.append((args.optimizer, args.qk_clip, args.log_max_attention_logit))
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
    with pytest.raises(AssertionError):
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
    assert settings.muon_tp_mode == config.muon_tp_mode == OptimizerConfig.muon_tp_mode


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--muon-exchange allgather", "--muon-exchange needs --optimizer muon --use-megatron-fsdp"),
        (
            "--use-megatron-fsdp --no-verify-checkpoint",
            "--no-verify-checkpoint needs --optimizer muon",
        ),
        (f"{MUON} --muon-exchange-buffer-mb nan", "--muon-exchange-buffer-mb nan is not finite"),
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
