"""Muon for any PyTorch model: plain tensors, and DTensors of FSDP2 and Megatron-FSDP.

`selection` says which parameters Muon takes, `part` has the step of its matrices, `muon` puts these
and AdamW together. Imports no Megatron.
"""
