"""The CPU backend warns of nothing that is so on every CPU."""

import logging

from megatron_muon.cpu import megatron
from megatron_muon.patching import Patches


def test_one_generator_for_two_is_nothing_to_warn_of(caplog):
    """A quickstart said so 37 times; what else that module warns of is heard."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    with Patches() as patches:
        megatron.install(patches)
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("something else")
    logger.warning("CPU RNG state changed within GPU RNG context")
    assert [record.getMessage()[:14] for record in caplog.records] == ["something else", "CPU RNG state "]
