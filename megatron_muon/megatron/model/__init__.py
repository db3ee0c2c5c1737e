"""What Muon has to know of a Megatron model: which weights are matrices, how they are named, cut and fused."""
