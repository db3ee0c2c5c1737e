"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer chain that the training loop drives."""

STATUS_FILE = "MEGATRON_MUON_STATUS_FILE"
"""Environment variable: where the first rank of a node leaves its exit status. torchrun's own is 1 for any other."""

FACTS = "facts.json"
"""What a run's first rank writes beside its events, for tools: see `patches.progress`."""
