"""What a run shows beside Megatron's log."""

from megatron_muon.megatron.patches.progress import muon_rate, progress_line

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
