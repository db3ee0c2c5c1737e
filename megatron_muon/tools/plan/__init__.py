"""`megatron-muon plan`: a step of Muon on paper, for any number of ranks."""
