"""What Muon refuses in either of two places: on the command line, and in a config that a script has built.

Plain values in, so that the command line can ask before torch is imported.
"""

from __future__ import annotations

from megatron_muon.errors import UserError


def check_share(strategy: str, *, exchange: str, tensor_parallel: int, tp_mode: str) -> None:
    """Check that `--muon-share-replicated` has replicated matrices to share, each of them one rank's by itself.

    Args:
        strategy: `--data-parallel-sharding-strategy`.
        exchange: `--muon-exchange`.
        tensor_parallel: the largest tensor parallel size, that of experts included.
        tp_mode: `--muon-tp-mode`.

    Raises:
        UserError: a sharded strategy, the all-gather exchange, or a mode in which tensor-parallel ranks orthogonalise
            together.
    """
    if strategy != "no_shard":
        raise UserError(
            f"--muon-share-replicated is for --data-parallel-sharding-strategy no_shard: {strategy} shares the work "
            "already (--muon-exchange owner); leave the flag out"
        )
    if exchange != "owner":
        raise UserError(
            f"--muon-exchange {exchange} has no rows to exchange with --muon-share-replicated: owners broadcast "
            "their updates; leave one of the two flags out"
        )
    if tensor_parallel > 1 and tp_mode != "blockwise":
        raise UserError(
            f"--muon-tp-mode {tp_mode} is not supported with --muon-share-replicated and tensor parallel size "
            f"{tensor_parallel}; use --muon-tp-mode blockwise, or leave --muon-share-replicated out"
        )


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


def check_async_save(*, device: str, persistent_worker: bool) -> None:
    """Check that `--async-save` would do what it says.

    Raises:
        UserError: on a CPU the worker would share the tensors that training changes; without the worker megatron-core
            0.19 saves in the foreground after a warning.
    """
    if device == "cpu":
        raise UserError(
            "--async-save does not work on the CPU, where the saving process would share the tensors that training "
            "changes; leave it out, and --use-persistent-ckpt-worker too"
        )
    if not persistent_worker:
        raise UserError(
            "--async-save does nothing without --use-persistent-ckpt-worker: megatron-core would save in the "
            "foreground; add that flag, or leave --async-save out"
        )
