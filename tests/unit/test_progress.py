"""What a run shows beside Megatron's log."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_muon.megatron.patches.progress import Progress, muon_rate, progress_line

ADAM = {"optimizer": "adam", "lr": 0.001, "default_config": True}


def test_muons_rate_is_shown_where_megatron_does_not_log_it():
    """With --muon-lr the log and TensorBoard had Adam's rate alone."""
    own = {"lr": 0.02, "default_config": False}
    assert muon_rate([ADAM, own]) == 0.02
    assert muon_rate([ADAM, {**own, "default_config": True}]) is None  # one schedule for both
    assert muon_rate([{**ADAM, "default_config": False}]) is None  # Adam's embeddings with --decoupled-lr
    line = progress_line(tokens_per_s=1000.0, share=0.1, seconds_left=60.0, muon_rate=0.02)
    assert line.endswith("of the step, Muon's learning rate 2.000000E-02, 0:01:00 left")
    assert "learning rate" not in progress_line(tokens_per_s=1000.0, share=0.1, seconds_left=60.0)


def test_a_step_that_is_not_finite_is_told_before_the_run_ends(tmp_path, monkeypatch):
    """Megatron ends it before it is logged; what told of it was a line of the rerun state machine in the log."""
    monkeypatch.setattr(
        "megatron_muon.megatron.patches.progress.get_args", lambda: SimpleNamespace(tensorboard_dir=str(tmp_path))
    )
    facts = tmp_path / "facts.json"
    progress = Progress(on_gpu=False)
    progress.step(lambda iteration: ({}, 0, False, False, 0), iteration=5)
    assert not facts.exists()
    progress.step(lambda iteration: ({}, True, True, True, 16), iteration=6)
    assert json.loads(facts.read_text()) == {"diverged_at": 7}

    def rejects(iteration):
        raise RuntimeError("Rank 1, node a, device 0, iteration 9: Unexpected result nan (message='non-finite loss')")

    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        progress.step(rejects, iteration=8)  # --rerun-mode disabled
    assert json.loads(facts.read_text()) == {"diverged_at": 9}


def test_parameters_are_counted_as_megatron_counts_them(tmp_path, monkeypatch):
    """Megatron-FSDP's parameters are whole over tensor-parallel ranks; a rank's own part stands beside them."""
    monkeypatch.setattr(
        "megatron_muon.megatron.patches.progress.get_args", lambda: SimpleNamespace(tensorboard_dir=str(tmp_path))
    )
    chunk = torch.nn.Linear(8, 6, bias=False)
    chunk.weight.orig_param = torch.empty(3, 8)
    alone = torch.nn.Linear(2, 2)
    progress = Progress(on_gpu=False)
    progress.watch(lambda config, model: SimpleNamespace(step=None), None, [chunk, alone])
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["parameters"] == 3 * 8 + 2 * 2 + 2
    assert torch.__version__.startswith(facts["versions"]["torch"])
    assert list(tmp_path.iterdir()) == [tmp_path / "facts.json"]  # it is written aside and renamed
