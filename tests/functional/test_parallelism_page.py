"""docs/parallelism.md claims what the tests of this run have shown, and with `-m ''` only that.

pytest runs this module after the others.
"""

from __future__ import annotations

import pytest

from tests.functional.cells import Cells, claimed
from tests.functional.cli import ROOT

SHOWN_BY = {"test_checkpoint_layouts", "test_checkpoints", "test_layouts"}


def test_every_cell_was_shown(request: pytest.FixtureRequest, cells: Cells) -> None:
    ran = {item.path.stem for item in request.session.items}
    everything = not request.config.option.markexpr
    if not ran >= SHOWN_BY or request.config.option.keyword:
        pytest.skip(f"needs a run with all of {', '.join(sorted(SHOWN_BY))}")
    if request.session.testsfailed:
        pytest.skip("tests have failed")
    page = (ROOT / "docs" / "parallelism.md").read_text("utf-8")
    cells_of_page = set(claimed(page))
    assert len(cells_of_page) > 50
    if everything:
        assert cells_of_page - cells.shown == set(), "the page claims what no test has shown"
    assert cells.shown - cells_of_page == set(), "the page leaves out what the tests show: write it anew"
