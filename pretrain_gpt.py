"""Train a GPT with megatron-core, and with Muon under Megatron-FSDP.

    torchrun --nproc-per-node 2 pretrain_gpt.py --optimizer muon --use-megatron-fsdp
    torchrun ... pretrain_gpt.py --config configs/NAME.yaml [any Megatron flag overrides]

Every flag of megatron.training is accepted; --help lists them, this package's own last.
"""

from megatron_muon.megatron.launch import run

if __name__ == "__main__":
    run()
