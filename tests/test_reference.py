"""The generated reference pages agree with the code."""

from __future__ import annotations

import re

import pytest
from safetensors.numpy import load_file
from scripts import ROOT, tool

from coda_prompt.methods import METHODS

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


def test_the_number_of_methods_is_stated_once_and_generated() -> None:
    stated = {}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        if numbers := re.findall(r"\b(\d+) methods\b", path.read_text("utf-8")):
            stated[path.name] = [int(number) for number in numbers]
    assert stated == {"options.md": [len(METHODS)]}


def test_methods_checked_against_released_code_are_those_with_golden_numbers() -> None:
    golden = {
        name.partition(".")[0]
        for path in (ROOT / "tests" / "golden").glob("*.safetensors")
        for name in load_file(path)
    }
    page = (ROOT / "docs" / "reference" / "methods.md").read_text("utf-8")
    compared, others = (
        set(re.findall(r"`([^` /]+)`", re.findall(rf"^\| {words}.*\|(.*)\|$", page, re.M)[0]))
        for words in ("parts of them agree", "not compared")
    )
    modules = {name: entry.type.__module__.rpartition(".")[2] for name, entry in METHODS.items()}
    expected = {
        name for name, module in modules.items() if {module, module.removesuffix("prompt")} & golden
    }
    assert compared == expected
    assert others == set(METHODS) - expected


def test_settings_of_the_papers_benchmarks_are_resolved() -> None:
    page = PAGES["presets.md"]
    rows = [line for line in page.splitlines() if "epochs |" in line or "nothing trains" in line]
    assert len(rows) == len(METHODS)
    assert "None" not in "".join(rows)
    assert re.search(r"\| `ft` \| 0.0001, 50 .*\(5e-05, 20 epochs\)", page)
    disagreements = (ROOT / "docs" / "paper.md").read_text("utf-8")
    for topic in ("learning rates", "L2P++'s pool", "general prompts", "class order", "validation"):
        assert f"{topic}" in disagreements.partition("## Where paper and")[2]
