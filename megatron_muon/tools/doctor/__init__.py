"""`megatron-muon doctor`: the environment and checkpoints (`command`), and with `--gpu` proof on a GPU (`gpu`)."""
