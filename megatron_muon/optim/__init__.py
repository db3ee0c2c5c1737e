"""The mathematics of Muon on tensors: block splits, orthogonalisation and the sharded optimizer."""
