"""What people type: a package or module for each command of `megatron-muon`. Nothing else in the package imports it."""
