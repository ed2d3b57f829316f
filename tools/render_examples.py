"""Run the notebooks of examples/ and write them, with their outputs, to docs/examples/.

    python tools/render_examples.py              # all of them
    python tools/render_examples.py first_lesson

Each becomes a page, NAME.md with pictures.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "examples"
MODULES = ("sketches",)
"""Files that notebooks import."""
TIMEOUT = 600


def names() -> list[str]:
    """Return the names of all examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in MODULES)


def execute(name: str) -> Any:
    """Run an example and return its notebook with outputs."""
    notebook = jupytext.read(EXAMPLES / f"{name}.py", fmt="py:percent")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    resources = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=TIMEOUT, resources=resources).execute()
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})  # one output per stream
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def render(name: str) -> None:
    """Run an example and write its page and its pictures."""
    started = time.perf_counter()
    notebook = execute(name)
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob(f"{name}_*.png"):
        old.unlink()
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    for output, content in resources["outputs"].items():
        text = text.replace(f"]({output})", f"]({name}_{output})")
        (PAGES / f"{name}_{output}").write_bytes(content)
    text = re.sub(r"/tmp/\w+", "/tmp/work", text)
    link = (
        f"`jupytext --to ipynb examples/{name}.py` makes a notebook of it. Its images come from "
        "`examples/sketches.py`."
    )
    heading, _, body = text.strip().partition("\n")
    note = "<!-- Written by tools/render_examples.py from examples/. Do not edit. -->"
    page = f"{note}\n\n{heading}\n\n{link}\n{body}\n"
    (PAGES / f"{name}.md").write_text(page, "utf-8")
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    for name in sys.argv[1:] or names():
        render(name)


if __name__ == "__main__":
    main()
