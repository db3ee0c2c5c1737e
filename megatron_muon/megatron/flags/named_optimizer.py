"""The optimizer of matrices that a run names: Muon, Megatron's, or a class for matrices."""

from __future__ import annotations

from typing import Any

from megatron_muon.errors import UserError

MUONS = ("muon", "adaptive_muon")
MEGATRONS = ("adam", "sgd", "dist_muon")
"""Values of --optimizer that this package leaves to Megatron; others are classes for matrices."""

LION = "lion"
"""A class whose update of an element depends on that element alone: nothing is exchanged."""


def is_class(optimizer: str) -> bool:
    """True if a value of `optimizer` names a class for matrices instead of Muon."""
    return optimizer not in (*MEGATRONS, *MUONS)


def settle_matrix_optimizer(args: Any) -> None:
    """Have `optimizer` of parsed flags name the class of --matrix-optimizer.

    Raises:
        UserError: --optimizer names another.
    """
    name = args.matrix_optimizer
    if name is None:
        return
    if ":" not in name:
        name = args.matrix_optimizer = name.lower()
    if args.optimizer not in ("adam", name):
        raise UserError(
            f"--matrix-optimizer {name} and --optimizer {args.optimizer} name two optimizers for"
            " matrices; leave --optimizer out"
        )
    args.optimizer = name
