"""The generated reference pages agree with the code."""

from __future__ import annotations

import pytest
from scripts import ROOT, tool

PAGES: dict[str, str] = tool("write_reference").pages()


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_up_to_date(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert committed == PAGES[name], "run: python tools/write_reference.py"


def test_every_embedded_file_is_on_the_licence_page() -> None:
    assets = ROOT / "src" / "coda_prompt" / "assets"
    page = (ROOT / "docs" / "reference" / "licences.md").read_text("utf-8")
    names = [path.name for path in assets.iterdir() if path.suffix not in (".md", ".py")]
    assert len(names) > 3
    assert [name for name in names if f"assets/{name}" not in page] == []
