"""The patches of checkpointing fail loudly where upstream has changed, and can be undone; ranks
show what they do.
"""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.training import checkpointing, training
from megatron.training.dist_signal_handler import DistributedSignalHandler

from megatron_muon.checkpoint import content, folders
from megatron_muon.errors import SaveError, UserError
from megatron_muon.megatron.checkpoint import loading as checkpoint_loading
from megatron_muon.megatron.checkpoint import saving as checkpoint_patches


def test_the_tracker_is_whole_and_other_files_are_left_alone(patches, tmp_path):
    checkpoint_patches.write_tracker_at_once(patches)
    client = checkpointing.maybe_msc
    tracker = tmp_path / folders.TRACKER
    with client.open(str(tracker), "w") as stream:
        stream.write("12")
        assert not tracker.exists()
    assert tracker.read_text() == "12"
    with client.open(str(tracker), "r") as stream:
        assert stream.read() == "12"
    with client.open(str(tmp_path / "notes"), "w") as stream:
        stream.write("in place")
        stream.flush()
        assert (tmp_path / "notes").read_text() == "in place"
    assert client.os.path.isfile(str(tracker))


def test_a_save_that_fails_names_the_one_before(patches, tmp_path, monkeypatch):
    def save(iteration: int, entry: object = 1) -> None:
        writer = dcp.FileSystemWriter(folders.iteration_folder(tmp_path, iteration))
        dcp.save(
            {"a": torch.ones(3), "b": entry},
            storage_writer=writer,
            no_dist=True,
        )

    checkpoint_patches.save_beside_and_rename(patches)
    monkeypatch.setattr(training, "save_checkpoint", save)
    monkeypatch.setattr(
        "megatron.training.get_args", lambda: types.SimpleNamespace(save=str(tmp_path))
    )
    checkpoint_patches.explain_failed_saves(patches)
    for iteration in (2, 4):
        training.save_checkpoint(iteration)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000002", "iter_0000004"]
    with pytest.raises(
        SaveError,
        match=r"iteration 6 could not be written .*resume with .* --ckpt-step 4",
    ):
        training.save_checkpoint(6, lambda: None)  # cannot be pickled
    assert folders.iterations(tmp_path) == [2, 4]


def arguments(**given: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{
            "ckpt_format": "fsdp_dtensor",
            "non_persistent_ckpt_type": None,
            "ckpt_step": None,
            **given,
        }
    )


def test_the_folder_that_will_be_loaded(tmp_path):
    folder = checkpoint_loading._folder_to_load
    assert folder(str(tmp_path), arguments()) is None
    (tmp_path / folders.TRACKER).write_text("8")
    assert folder(str(tmp_path), arguments()) == tmp_path / "iter_0000008"
    assert folder(str(tmp_path), arguments(ckpt_step=4)) == tmp_path / "iter_0000004"
    assert folder(str(tmp_path), arguments(ckpt_format="torch_dist")) is None
    assert folder(None, arguments()) is None
    # megatron-core reads it all the same, and ended with status 0
    (tmp_path / folders.TRACKER).write_text("damaged")
    with pytest.raises(UserError, match="instead of an iteration"):
        folder(str(tmp_path), arguments(ckpt_step=4))
    (tmp_path / folders.TRACKER).write_text("release")
    assert folder(str(tmp_path), arguments()) == Path(tmp_path / "release")
    with pytest.raises(UserError, match=r"iter_0000004 does not exist; .*no complete checkpoint"):
        checkpoint_loading._require_sound(tmp_path / "iter_0000004", verify=True)


def test_a_signal_of_any_rank_is_remembered(patches, monkeypatch):
    monkeypatch.setattr(DistributedSignalHandler, "signals_received", lambda self: [0, 1])
    checkpoint_patches.remember_signals(patches)
    handler = DistributedSignalHandler()
    assert handler.signals_received() == [0, 1]
    assert handler.any_received is True


def test_each_slot_of_a_fused_parameter_goes_with_its_parts():
    """0.20 splits latent attention's down projection too, whose parts have other names; megatron's
    handlers split `exp_avg` and `exp_avg_sq` alone.
    """
    fused, down = "layers.0.mlp.linear_fc1.weight", "layers.0.self_attention.{}_down_proj.weight"
    latent, norm = down.format("linear_qkv"), "layers.0.input_layernorm.weight"
    absorbed = "layers.0.self_attention.linear_qkv_down_proj.layer_norm_weight"
    new = {
        fused: (f"{fused}_w", f"{fused}_v"),
        latent: (down.format("linear_q"), down.format("linear_kv")),
        absorbed: (norm,),
    }
    shapes = {fused: (4, 2), latent: (6, 2), absorbed: (2,), "output.weight": (3, 2)}

    def split(tensors):
        made = {}
        for name, tensor in tensors.items():
            parts = new.get(name, (name,))
            made.update(zip(parts, tensor.chunk(len(parts)), strict=True))
        return made

    state = {}
    for name, shape in shapes.items():
        state[name] = {"momentum_buffer": torch.rand(shape), "step": torch.tensor(3.0)}
    state[latent]["moment2"] = torch.rand(6, 1)
    made = {"layers.1.mlp.linear_fc1.weight_w": {"step": torch.tensor(3.0)}}
    found = checkpoint_patches._in_parts(state | made, shapes, split)
    assert list(found) == [*new[fused], *new[latent], norm, "output.weight", *made]
    assert found["output.weight"] is state["output.weight"]
    for name, parts in new.items():
        halves = [found[part]["momentum_buffer"] for part in parts]
        assert torch.equal(torch.cat(halves), state[name]["momentum_buffer"])
        assert all(found[part]["step"] == 3 for part in parts)
    query, key_value = new[latent]
    assert found[query]["moment2"] is state[latent]["moment2"]
    assert found[key_value].keys() == {"momentum_buffer", "step"}
    for name, parts in new.items():
        assert {content.whole_name(part, state) for part in parts} == {name}
