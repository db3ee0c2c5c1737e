"""A plain nn.Module under Megatron-FSDP: which of its 2D weights Muon takes."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.pool import Pool

WORDS, WIDTH = 64, 16


class Plain(nn.Module):
    """A language model in which no name holds "embedding"."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.down(self.up(self.wte(tokens)).relu()))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def left(rank: int, world_size: int) -> list[dict[str, str]]:
    """In a worker: what Muon leaves of an untied and a tied model, with reasons, after a step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer import TransformerConfig

    import megatron_muon
    from megatron_muon.megatron.model import matrices

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim",
        gradient_reduce_div_fusion=False,
    )
    found = []
    for tied in (False, True):
        model = FullyShardedDataParallel(config, sharding, Plain(tied=tied))
        settings = megatron_muon.MuonOptimizerConfig(
            optimizer="muon", lr=0.01, use_distributed_optimizer=True
        )
        optimizer = megatron_muon.get_megatron_muon_optimizer(settings, [model])
        optimizer.zero_grad()
        model(torch.arange(32).view(2, 16)).backward()
        finalize_model_grads([model])
        assert optimizer.step()[0]
        rest = [
            (p, n)
            for p, n in matrices.parameter_names([model]).items()
            if p.ndim == 2 and not matrices.is_muon_matrix(p)
        ]
        found.append({name: getattr(parameter, "why_not_muon", "") for parameter, name in rest})
    return found


def test_embeddings_and_the_output_layer_are_known_by_their_modules(ranks: Pool) -> None:
    """They went to Muon without a word, a matrix of the vocabulary's rows among the hidden ones."""
    untied = {"wte.weight": "embedding", "head.weight": "output layer"}
    assert ranks(2, left)[0] == [untied, {"wte.weight": "embedding"}]
