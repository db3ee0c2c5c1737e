"""`megatron-muon doctor`: the environment and checkpoints (`command`), and with `--gpu` proof on a GPU (`gpu`)."""

SKIPPED = "skipped: no GPU"
"""Figure of what only a GPU can do, on a CPU."""
