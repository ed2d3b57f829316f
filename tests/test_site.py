"""The documentation: options, public names, links, drawings, notebooks, and the built site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
import yaml
from safetensors.numpy import load_file
from small import ROOT, tool

from coda_prompt.research.methods import METHODS
from coda_prompt.serve.app import make_app

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = sorted((DOCS / "guide").glob("*.md"))
README = ROOT / "README.md"
check_site = tool("check_site")
DRAWINGS: dict[str, str] = tool("draw_diagrams").drawings()


def names_of(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


def navigation(entries: object) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in navigation(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(navigation(config["nav"])) == [
        page.relative_to(DOCS).as_posix() for page in PAGES
    ]


@pytest.mark.parametrize("page", [README, *PAGES], ids=names_of([README, *PAGES]))
def test_links_to_files_of_the_repository_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / unquote(target)).exists(), target


def test_every_command_option_route_method_and_preset_is_in_the_reference() -> None:
    texts = {
        page.relative_to(DOCS).with_suffix("").as_posix(): page.read_text("utf-8") for page in PAGES
    }
    assert sum(len(options) for options in check_site.command_line().values()) > 150
    assert list(check_site.missing_names(texts)) == []
    for page, name, problem in (
        ("cli", "`--skip-bad`", "the command line page does not mention coda learn --skip-bad"),
        ("http", "GET /v1/accuracy", "http: no route GET /v1/accuracy"),
        ("options", "## coda-p\n", "options: no method coda-p"),
        ("methods", "`coda-p`", "methods: no method coda-p"),
        ("presets", "`pocket-b50`", "presets: no preset pocket-b50"),
    ):
        path = f"reference/{page}"
        without = {**texts, path: texts[path].replace(name, "")}
        assert problem in check_site.missing_names(without)


def test_every_route_of_the_service_is_in_the_reference() -> None:
    paths = make_app({"model": Mock()}).openapi()["paths"]
    routes = {f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs}
    assert routes == set(check_site.routes())


def test_every_field_in_the_reference_has_a_meaning() -> None:
    for name in ("cli", "options", "presets", "model-format", "http"):
        text = (DOCS / "reference" / f"{name}.md").read_text("utf-8")
        rows = [row for row in text.splitlines() if row.startswith("| `") and "| body |" not in row]
        assert not [row for row in rows if row.endswith("|  |")], name


@pytest.mark.parametrize("page", GUIDES, ids=names_of(GUIDES))
def test_guide_is_read_in_five_minutes(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("    ", "|--")))
    assert len(prose.split()) <= 1200  # at 240 words a minute


def test_every_public_name_is_in_the_python_reference() -> None:
    directives = "".join(page.read_text("utf-8") for page in (DOCS / "reference/python").iterdir())
    described = re.findall(r"^::: (\S+)", directives, re.M)
    for name in check_site.public_names():
        owner = name.partition(".")[0]
        assert any(
            each == name or each.endswith((f".{owner}", f".{name}")) for each in described
        ), name


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_is_up_to_date(name: str) -> None:
    drawn = (DOCS / "images" / name).read_text("utf-8")
    assert drawn == DRAWINGS[name], "run: python tools/draw_diagrams.py"


def test_site_check_reports_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    for name in ("cli", "http", "options", "methods", "presets"):
        (tmp_path / "reference" / f"{name}.html").write_text("<h2>coda learn</h2><p>--json</p>")
    (tmp_path / "index.html").write_text(
        '<a href="gone.html">x</a><a href="reference/cli.html#gone">y</a>'
        '<a href="reference/cli.html">z</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    found = list(check_site.problems(tmp_path))
    assert "index.html: gone.html does not exist" in found
    assert "index.html: reference/cli.html#gone has no such anchor" in found
    assert "index.html: loads https://example.org/x.js from another host" in found
    assert "the command line page does not mention coda learn --backbone" in found
    assert "the command line page does not mention coda learn --json" not in found
    assert "the command line page has no section coda predict" in found
    assert "http: no route POST /v1/predict" in found
    assert "the Python reference does not mention ContinualClassifier.learn" in found
    assert "presets: no preset pocket" in found
    assert not any("cli.html does not" in problem for problem in found)


@pytest.mark.slow
def test_site_builds_without_warnings_and_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert list(check_site.problems(tmp_path)) == []


# -- notebooks


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


# -- generated reference pages


GENERATED: dict[str, str] = tool("write_reference").pages()


@pytest.mark.parametrize("name", GENERATED)
def test_reference_page_is_up_to_date(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert committed == GENERATED[name], "run: python tools/write_reference.py"


def test_every_embedded_file_is_on_the_licence_page() -> None:
    assets = ROOT / "src" / "coda_prompt" / "assets"
    page = (ROOT / "docs" / "reference" / "licences.md").read_text("utf-8")
    names = [path.name for path in assets.iterdir() if path.suffix not in (".md", ".py")]
    names = [name for name in names if name != "__pycache__"]
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
    page = GENERATED["presets.md"]
    rows = [line for line in page.splitlines() if "epochs |" in line or "nothing trains" in line]
    assert len(rows) == len(METHODS)
    assert "None" not in "".join(rows)
    assert re.search(r"\| `ft` \| 0.0001, 50 .*\(5e-05, 20 epochs\)", page)
    disagreements = (ROOT / "docs" / "paper.md").read_text("utf-8")
    for topic in ("learning rates", "L2P++'s pool", "general prompts", "class order", "validation"):
        assert f"{topic}" in disagreements.partition("## Where paper and")[2]
