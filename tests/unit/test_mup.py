"""`--use-mup`: which parameters get megatron-core's rates by width, beside Muon's own rate."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import get_mup_config_overrides, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides

from megatron_muon.megatron.factory import _overrides
from megatron_muon.megatron.muon_config import MuonOptimizerConfig

WIDTH = 4.0


def parameter(*shape: int, **marks: bool) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(made, name, value)
    return made


PARAMETERS = {
    "layers.0.weight": parameter(8, 8),
    "layers.0.experts": parameter(2, 8, 8, expert_stack=True),
    "layers.0.excluded": parameter(8, 8, use_muon=False),
    "layers.0.norm": parameter(8),
    "embedding.weight": parameter(
        32, 8, is_embedding_or_output_parameter=True, is_embedding_parameter=True
    ),
    "output_layer.weight": parameter(
        32, 8, is_embedding_or_output_parameter=True, is_embedding_parameter=False
    ),
}


def found(config, *, ours=True):
    given = {
        **get_standard_config_overrides(config),
        **get_mup_config_overrides(config, WIDTH, config.optimizer),
    }
    overrides = _overrides(config, given, WIDTH) if ours else given
    return {
        name: combine_param_group_overrides(
            [value for key, value in overrides.items() if key.matches(weight, name)]
        )
        for name, weight in PARAMETERS.items()
    }


@pytest.mark.parametrize("muon_lr", [None, 0.02])
@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon"])
def test_mup_divides_the_rates_of_adams_matrices_by_width_and_leaves_muons_alone(
    optimizer, muon_lr
):
    """A stack of experts had two rates, a ValueError; an excluded matrix kept the narrow model's
    rate.
    """
    config = MuonOptimizerConfig(
        optimizer=optimizer, lr=0.008, min_lr=0.0008, adam_eps=1e-8, muon_lr=muon_lr
    )
    settled = found(config)
    for name in ("layers.0.weight", "layers.0.experts"):
        assert settled[name].get("max_lr") == muon_lr
        assert "optimizer" not in settled[name]
    for name in ("layers.0.excluded", "output_layer.weight"):
        assert (settled[name]["max_lr"], settled[name]["min_lr"]) == (0.002, 0.0002)
        assert settled[name]["eps"] == 2.5e-9
        assert settled[name]["optimizer"] == "adam"
    for name in ("layers.0.norm", "embedding.weight"):
        assert settled[name].keys().isdisjoint({"max_lr", "eps"})
    alone = found(config, ours=False)  # negative control: megatron-core's own
    assert alone["layers.0.experts"]["max_lr"] == 0.002
    assert "max_lr" not in alone["layers.0.excluded"]


def test_mup_divides_the_rate_of_a_class_by_width_as_upstream_does():
    config = MuonOptimizerConfig(optimizer="soap", lr=0.008, min_lr=0.0008, adam_eps=1e-8)
    ours, theirs = found(config), found(config, ours=False)
    assert ours["layers.0.weight"]["max_lr"] == config.lr / WIDTH
    for name in ("layers.0.weight", "output_layer.weight", "layers.0.norm"):
        assert ours[name].get("max_lr") == theirs[name].get("max_lr"), name
