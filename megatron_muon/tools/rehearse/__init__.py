"""`megatron-muon rehearse`: every rank's real optimizer, on fake tensors, recorded and compared."""
