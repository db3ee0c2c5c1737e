"""The class of optimizers for matrices that flags or a config name instead of Muon."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from megatron_muon.core.methods.candidate import OURS, Candidate, find
from megatron_muon.errors import SettingError
from megatron_muon.megatron.upstream import OptimizerConfig, _kwargs_from_config

_PYTHONS = {"true": "True", "false": "False", "none": "None"}


def candidate_of(config: Any) -> Candidate:
    """The class that a config, or parsed flags, name as `optimizer`, with its arguments upstream.

    These are fields of the config, `soap_shampoo_beta` or `shampoo_beta`, Adam's betas, and
    `--matrix-optimizer-args`, which win.

    Source: megatron.core.optimizer.emerging_optimizers, which registers all classes so.

    Raises:
        SettingError: there is no such class, or it lacks an argument.
    """
    config = SimpleNamespace(**{**vars(OptimizerConfig()), **vars(config)})
    given = _given(config.matrix_optimizer_args)
    found = find(config.optimizer, given)
    takes = inspect.signature(found.make).parameters
    _refuse_unused(found.name, takes, config)
    arguments = _kwargs_from_config(found.make, found.name, config)
    if "betas" in takes:
        arguments["betas"] = config.adam_beta1, config.adam_beta2
    for name in OURS:
        arguments.pop(name, None)
    return replace(found, arguments={**arguments, **given})


def _refuse_unused(name: str, takes: Any, config: Any) -> None:
    """Refuse fields of Megatron's config for this class that the class does not take."""
    for field in fields(OptimizerConfig):
        value = getattr(config, field.name)
        argument = field.name.removeprefix(f"{name}_")
        if argument != field.name and argument not in takes and value != field.default:
            raise SettingError(
                field.name,
                value,
                f"has no effect: this emerging-optimizers' {name} takes no {argument}",
                "leave it out",
            )


def _given(pairs: list[str]) -> dict[str, Any]:
    """The arguments of `--matrix-optimizer-args`, Python literals or text."""
    found: dict[str, Any] = {}
    for pair in " ".join(pairs).split():
        name, _, value = pair.partition("=")
        if not (name.isidentifier() and value):
            raise SettingError(
                "matrix_optimizer_args",
                pair,
                "is not KEY=VALUE",
                "for example, type use_kl_shampoo=False",
            )
        try:
            found[name] = ast.literal_eval(_PYTHONS.get(value.lower(), value))
        except (ValueError, SyntaxError):
            found[name] = value
    return found
