"""`megatron-muon doctor`: checks of an environment, a checkpoint and offloaded momentum."""
