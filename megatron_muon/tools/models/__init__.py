"""From checkpoints to models that other software reads, and back: export, import, generate, eval.

`checkpoint` has the tensors of a checkpoint, whatever layout wrote it; `architecture` what flags and config.json
describe; `mapping` which tensor becomes which; `convert` writes folders, `model` and `use` work in memory.
"""
