"""`python -m benchmarks.rehearse`: a step of all ranks' real optimizers on fake tensors."""
