"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer chain that the training loop drives."""

STATUS_FOLDER = "MEGATRON_MUON_STATUS_FOLDER"
"""Environment variable: where each rank leaves N.json as it ends, N being its number on this machine: its exit `status`
(torchrun's own is 1 for any failure), `error`, a line that says why, or null, and the `time` of that."""

FACTS = "facts.json"
"""What a run's first rank writes beside its events, for tools: see `state_report.write_facts`."""
