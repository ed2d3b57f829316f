"""The generated reference pages agree with the code."""

from __future__ import annotations

import pytest
from scripts import ROOT, tool

PAGES: dict[str, str] = tool("write_reference").pages()


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_up_to_date(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert committed == PAGES[name], "run: python tools/write_reference.py"
