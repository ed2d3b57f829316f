"""The documentation: every option and public name, links, drawings, and the built site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from scripts import ROOT, tool

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
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


def test_every_command_and_option_is_in_the_command_line_reference() -> None:
    text = (DOCS / "reference" / "cli.md").read_text("utf-8")
    names = check_site.command_line_names()
    assert len(names) > 60
    missing = [name for name in names if not re.search(rf"{re.escape(name)}(?![\w-])", text)]
    assert not missing


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
    for name in ("cli", "options", "presets"):
        (tmp_path / f"{name}.html").write_text("<p>nothing</p>")
    (tmp_path / "index.html").write_text(
        '<a href="gone.html">x</a><a href="cli.html#gone">y</a><a href="cli.html">z</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    found = list(check_site.problems(tmp_path))
    assert "index.html: gone.html does not exist" in found
    assert "index.html: cli.html#gone has no such anchor" in found
    assert "index.html: loads https://example.org/x.js from another host" in found
    assert "the command line page does not mention --backbone" in found
    assert "the Python reference does not mention ContinualClassifier.learn" in found
    assert "no preset pocket" in found
    assert not any("cli.html does not" in problem for problem in found)


@pytest.mark.slow
def test_site_builds_without_warnings_and_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert list(check_site.problems(tmp_path)) == []
