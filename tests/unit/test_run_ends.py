"""The end of a run: its exit status, whether it diverged, and the command that continues it."""

import pytest

from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools.train.processes import Ended
from megatron_muon.tools.train.run_summary import in_words, summary_of
from megatron_muon.tools.train.train import _exit_status
from tests.support.made_runs import make_run


@pytest.mark.parametrize(
    ("ended", "rank", "status"),
    [
        (Ended(0), 0, 0),
        (Ended(1), 2, 2),
        (Ended(1), 75, 75),  # a rank received the signal, not this process
        (Ended(1), None, 1),
        (Ended(137), 0, 137),
        (Ended(1, 15), 75, 75),
        (Ended(1, 15), None, 143),
        (Ended(1, 2), 75, 130),
        (Ended(1, 1), None, 129),
    ],
)
def test_the_status_is_the_runs(ended, rank, status):
    assert _exit_status(ended, rank) == status


def summary_for(root, *, status, error=None, diverged_at=None):
    """What `train` would write of a run of 8 ranks in `root`."""
    run = dict.fromkeys(("name", "command", "torchrun", "config_hash", "tensorboard_dir"), "x")
    run |= {"settings": {"train_iters": 6, "optimizer": "adam"}, "ranks": 8}
    run["started"] = "2026-11-26T08:00:00+00:00"
    folder = RunFolder(root, root / "tensorboard", root / "checkpoints")
    return summary_of(folder, status=status, error=error, run=run, diverged_at=diverged_at)


@pytest.mark.parametrize(
    # the second with --rerun-mode disabled, which loses losses that were not yet flushed
    ("at", "error"),
    [
        (5, "TypeError"),
        (None, "RuntimeError: Rank 1, node a, iteration 5: Unexpected result nan (message='x')"),
    ],
)
def test_a_non_finite_loss_is_a_divergence(tmp_path, at, error):
    """Megatron ends such a step before it is logged: neither events nor iteration lines show it."""
    make_run(tmp_path / "run", lambda step: 5.5, steps=3)
    summary = summary_for(tmp_path / "run", status=1, error=error, diverged_at=at)
    assert (summary["outcome"], summary["diverged"], summary["diverged_at"]) == ("failed", True, 5)
    assert (summary["muon_parameters"], summary["world_size"], summary["go_on"]) == (1000, 8, None)
    assert not summary_for(tmp_path / "run", status=0)["diverged"]


def test_a_run_of_three_steps_has_not_diverged(tmp_path):
    """The loss may rise in a warm-up; the only validation set has a name, too."""
    make_run(tmp_path / "run", lambda step: 5.5 + step / 100, steps=3, every=3, skipped=2)
    summary = summary_for(tmp_path / "run", status=0)
    assert (summary["diverged"], summary["diverged_why"]) == (False, None)
    assert summary["validation_loss"] == {"validation": pytest.approx(5.63)}
    assert summary["skipped_iterations"] == 1
    assert in_words(summary).endswith("training loss 5.5200, validation loss 5.6300")


@pytest.mark.parametrize(
    ("status", "steps", "checkpoint", "goes_on"),
    [
        (0, 5, False, True),  # --exit-duration-in-mins
        (0, 6, False, False),
        (1, 0, True, True),
        (1, 0, False, True),
        (2, 0, True, True),
        (2, 0, False, False),
        (75, 5, True, True),
        (130, 0, False, True),
        (137, 0, True, True),
        (16, 0, True, True),
    ],
)
def test_the_summary_says_how_to_continue(tmp_path, status, steps, checkpoint, goes_on):
    """After a rank was killed it had neither the reason nor a command."""
    root = tmp_path / "a run"
    if steps:
        make_run(root, lambda step: 5.5, steps=steps)
    (root / "checkpoints").mkdir(parents=True)
    if checkpoint:
        (root / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    summary = summary_for(root, status=status, error="why")
    expected = f"megatron-muon train --resume --out '{root}'" if goes_on else None
    assert summary["go_on"] == expected
    assert summary["error"] == ("why" if status in (1, 2, 16, 137) else None)
