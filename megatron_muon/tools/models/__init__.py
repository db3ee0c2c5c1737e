"""From checkpoints to models that other software reads, and back: export, import, generate, eval.

In the order of an export: `weights` (the tensors of a checkpoint, whatever layout wrote it), `architecture` (what its
flags describe) and `hf_config` (that as config.json), `mapping` (which tensor becomes which), `folder` (the files);
`written` writes checkpoints that Megatron reads. One process, no GPU, no rank.
"""
