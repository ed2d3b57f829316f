"""Check a built site: links, anchors, names that must be there, and nothing from other hosts.

    python tools/check_site.py site

Prints every problem; exits with code 1 if there is one. Addresses of other hosts in links are
listed, not opened.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer
from reference_formats import openapi

from coda_prompt import __all__ as package_names
from coda_prompt import errors
from coda_prompt.cli import app
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.research.bench.config import shipped
from coda_prompt.research.methods import METHODS

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads when it opens a page."""


class Page(HTMLParser):
    """The links, the loaded addresses, the anchors and the text of a page, with `##` for h2."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self._text: list[str] = []
        self.feed(path.read_text("utf-8"))
        self.text = " ".join(self._text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        if tag == "h2":
            self._text.append("\n##")
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])

    def handle_data(self, data: str) -> None:
        self._text.append(data)


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        for address in page.loaded:
            if urlsplit(address).netloc:
                yield f"{name}: loads {address} from another host"
        if name != "404.html":  # its links are absolute
            yield from _broken_links(name, path, page, pages)
    texts = {path.relative_to(site.resolve()).as_posix(): page.text for path, page in pages.items()}
    yield from missing_names({name.removesuffix(".html"): text for name, text in texts.items()})
    anchors = set().union(*(page.anchors for page in pages.values()))
    for public in public_names():
        if not any(anchor == public or anchor.endswith(f".{public}") for anchor in anchors):
            yield f"the Python reference does not mention {public}"


def _broken_links(name: str, path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for address in (*page.links, *page.loaded):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        if not target.exists():
            yield f"{name}: {address} does not exist"
        elif parts.fragment and target in pages:
            anchors = pages[target].anchors
            if unquote(parts.fragment) not in anchors and parts.fragment != "__skip":
                yield f"{name}: {address} has no such anchor"


def missing_names(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield commands, options, routes, methods and presets that are missing.

    Args:
        texts: Text of each page by its path without suffix, with `##` before second headings.
    """
    sections = re.split(r"\n##\s+(coda [\w-]+)", texts["reference/cli"])
    by_command = dict(zip(sections[1::2], sections[2::2], strict=True))
    for command, options in command_line().items():
        if command not in by_command:
            yield f"the command line page has no section {command}"
        for option in options:
            if not _mentions(by_command.get(command, ""), option):
                yield f"the command line page does not mention {command} {option}"
    for page, kind, names in (
        ("http", "route", routes()),
        ("options", "method", list(METHODS)),
        ("methods", "method", list(METHODS)),
        ("presets", "preset", list(shipped("presets"))),
    ):
        text = texts[f"reference/{page}"]
        yield from (f"{page}: no {kind} {name}" for name in names if not _mentions(text, name))


def _mentions(text: str, name: str) -> bool:
    """Return whether a text has a name that is not part of a longer one."""
    return bool(re.search(rf"(?<![\w/+-]){re.escape(name)}(?![\w/+-])", text))


def command_line() -> dict[str, list[str]]:
    """Return every command of `coda` with its options."""
    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        options = [each for each in command.params if each.param_type_name == "option"]
        names = [text for each in options for text in (*each.opts, *each.secondary_opts)]
        hidden = {text for each in options if each.hidden for text in each.opts}
        found[f"coda {name}"] = [each for each in names if each not in {*hidden, "--help"}]
    return found


def routes() -> list[str]:
    """Return every route of the HTTP interface."""
    paths: dict[str, Any] = openapi()["paths"]
    return [f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs]


def public_names() -> list[str]:
    """Return what a program may use: exports, members of the classifier, and errors."""
    functions = [name for name in package_names if name.islower() and not name.startswith("_")]
    members = [
        f"ContinualClassifier.{name}"
        for name, _ in inspect.getmembers(ContinualClassifier)
        if not name.startswith("_")
    ]
    kinds = [
        f"errors.{name}"
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if each.__module__ == errors.__name__
    ]
    exported = [f"coda_prompt.{name}" for name in functions]
    return [*exported, "ContinualClassifier", *members, *kinds]


def main() -> None:
    found = list(problems(Path(sys.argv[1])))
    for problem in found:
        print(problem)
    print(f"{len(found)} problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
