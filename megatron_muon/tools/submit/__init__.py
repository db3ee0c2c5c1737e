"""`megatron-muon submit`: runs as jobs of SLURM."""
