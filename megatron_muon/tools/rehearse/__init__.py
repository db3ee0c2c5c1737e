"""`megatron-muon rehearse`: every rank's real optimizer, on fake tensors, recorded, compared and played back."""
