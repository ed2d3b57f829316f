"""The notebooks of examples/: rendered pages are up to date, and every notebook runs."""

from __future__ import annotations

import re

import pytest
from scripts import ROOT, tool

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = [path.stem for path in EXAMPLES if path.read_text("utf-8").startswith("# %%")]


def code_cells(name: str) -> list[str]:
    """Return the code cells of an example."""
    text = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    cells = re.split(r"^# %%(.*)\n", text, flags=re.M)
    return [
        body.strip().replace("# %matplotlib", "%matplotlib")
        for head, body in zip(cells[1::2], cells[2::2], strict=True)
        if "markdown" not in head
    ]


def test_there_are_seven_notebooks() -> None:
    assert len(NOTEBOOKS) == 7


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_rendered_page_has_the_code_and_outputs_of_the_example(name: str) -> None:
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text("utf-8")
    for cell in code_cells(name):
        assert cell in page, f"run: python tools/render_examples.py {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name: str) -> None:
    for module in ("jupytext", "nbclient", "nbconvert", "ipykernel"):
        pytest.importorskip(module)
    notebook = tool("render_examples").execute(name)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
