"""Muon in Megatron: flags, patches, the model, checkpoints, and the optimizer chain that the training loop drives."""

STATUS_FOLDER = "MEGATRON_MUON_STATUS_FOLDER"
"""Environment variable: where each rank leaves N.json as it ends, N being its number on this machine: its exit `status`
(torchrun's own is 1 for any failure), `error`, a line that says why, or null, and the `time` of that."""

FACTS = "facts.json"
"""What a training knows of itself, for tools, in --tensorboard-dir: `versions`, `commit`, `dirty`, `processor`;
`parameters` of the model on a model-parallel rank; of a Muon `muon_parameters`, `scalar_parameters`, `plan`, its
digest, and `plans`, the figures of each kind of group; `state_bytes` of all ranks together, by kind; `diverged_at`, the
iteration at which Megatron ended the run for a number that is not finite. TensorBoard and Weights & Biases show all."""

FACTS_PREFIX = "facts/"
"""Of their names there."""

WANDB_RUN = "wandb.json"
"""In a run's folder: the `id` by which Weights & Biases knows it, and the `folder` when it got that."""
