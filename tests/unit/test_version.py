"""The version guard: what is in range passes, what is outside is named with the remedy."""

from importlib import metadata

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.version import check_versions


def test_versions_in_range_pass():
    for megatron_core in ("0.19.0", "0.19.7", "0.19.0rc1", "0.19a1", "0.19", None):
        check_versions(megatron_core)


@pytest.mark.parametrize("megatron_core", ["0.16.1", "0.18.4", "0.20.0", "0.190.0", "1.0.0"])
def test_another_megatron_core_is_named_with_the_one_to_install(megatron_core):
    """On Python 3.11 pip installs megatron-core 0.16.1, so the Python is named too."""
    with pytest.raises(UserError, match=rf"^megatron-core {megatron_core} .*Python 3.12 .*'megatron-core==0\.19\.\*'$"):
        check_versions(megatron_core)


def test_an_absent_megatron_core_is_an_error_that_says_what_to_type(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(UserError, match=r"megatron-core is not installed; type pip install"):
        check_versions()
