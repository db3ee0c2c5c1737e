"""The model: its matrices as Muon sees them, and GPT for Megatron's pretrain."""
