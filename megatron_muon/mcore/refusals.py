"""What Muon refuses in either of two places: on the command line, and in a config that a script has built.

Plain values in, so that the command line can ask before torch is imported.
"""

from __future__ import annotations

from megatron_muon.errors import UserError


def check_dump(strategy: str) -> None:
    """Check that there is a layout to dump.

    Raises:
        UserError: under `no_shard` every rank holds whole matrices.
    """
    if strategy == "no_shard":
        raise UserError(
            "--muon-dump-layout has nothing to write with --data-parallel-sharding-strategy no_shard: every rank holds "
            "whole matrices; use optim, optim_grads or optim_grads_params, or leave the flag out"
        )
