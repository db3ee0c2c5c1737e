"""The script pretrain_gpt.py for an installed package, without a checkout.

    torchrun --nproc-per-node 2 -m megatron_muon.pretrain_gpt --config FILE.yaml

A run that names no model takes configs/quickstart.yaml, of the current folder or of those that come
with the package.
"""

from megatron_muon.megatron.launch import run

if __name__ == "__main__":
    run()
