"""Muon for any PyTorch model: plain tensors, and DTensors of FSDP2 and Megatron-FSDP.

`selection` says which parameters are matrices for Muon, `cuts` who holds which rows of them, `muon`
puts the two and the core's engine together. Imports no Megatron.
"""
