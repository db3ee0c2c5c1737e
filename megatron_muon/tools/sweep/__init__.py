"""`megatron-muon sweep`: many runs over settings and seeds."""
