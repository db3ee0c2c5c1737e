"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer chain that the training loop drives."""
