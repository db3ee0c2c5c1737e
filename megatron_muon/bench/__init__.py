"""`megatron-muon bench`: optimizer steps and training steps, measured."""
