"""`megatron-muon doctor`: checks the environment and checkpoints, and with `--gpu` the GPU."""
