"""The version guard: what is in range passes, what is outside is named with the remedy."""

from importlib import metadata

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.version import check_versions


@pytest.mark.parametrize("python", [(3, 12), (3, 13)])
@pytest.mark.parametrize("megatron_core", ["0.19.0", "0.19.7", "0.19.0rc1", "0.19a1", "0.19"])
def test_versions_in_range_pass(python, megatron_core):
    check_versions(python, megatron_core)
    check_versions()  # what is installed


@pytest.mark.parametrize("megatron_core", ["0.16.1", "0.18.4", "0.20.0", "0.20.0rc0", "1.0.0", "0.0.0"])
def test_another_megatron_core_is_named_with_the_one_to_install(megatron_core):
    with pytest.raises(UserError, match=rf"^megatron-core {megatron_core} .*pip install 'megatron-core>=0.19,<0.20'$"):
        check_versions((3, 12), megatron_core)


@pytest.mark.parametrize("python", [(3, 14), (3, 11), (2, 7)])
def test_another_python_is_named_before_megatron_core(python):
    """On Python 3.11 pip installs megatron-core 0.16.1, so the Python is the cause and the remedy."""
    with pytest.raises(UserError, match=rf"^Python {python[0]}\.{python[1]} does not suit .*python3\.12 or 3\.13$"):
        check_versions(python, "0.16.1")


def test_an_absent_megatron_core_is_an_error_that_says_what_to_type(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(UserError, match=r"megatron-core is not installed; type pip install"):
        check_versions((3, 12))
