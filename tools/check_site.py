"""Check a built site: links, anchors, names that must be there, and nothing from other hosts.

    python tools/check_site.py site

Prints every problem; exits with code 1 if there is one. Addresses of other hosts in links are
listed, not opened.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer

from coda_prompt import __all__ as package_names
from coda_prompt import errors
from coda_prompt.bench.config import shipped
from coda_prompt.cli import app
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.methods import METHODS

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads when it opens a page."""


class Page(HTMLParser):
    """The links, the loaded addresses, the anchors and the text of a page."""

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
    yield from _missing_names({path.stem: page for path, page in pages.items()}, pages.values())


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


def _missing_names(by_stem: dict[str, Page], pages: Any) -> Iterator[str]:
    """Yield commands, options and public names that no page has."""
    commands = by_stem["cli"].text
    for option in command_line_names():
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", commands):
            yield f"the command line page does not mention {option}"
    anchors = set().union(*(page.anchors for page in pages))
    for public in public_names():
        if not any(anchor == public or anchor.endswith(f".{public}") for anchor in anchors):
            yield f"the Python reference does not mention {public}"
    methods = by_stem["options"].text
    yield from (f"no options of method {name}" for name in METHODS if name not in methods)
    presets = by_stem["presets"].text
    yield from (f"no preset {name}" for name in shipped("presets") if name not in presets)


def command_line_names() -> list[str]:
    """Return every command and option of `coda`."""
    group: Any = typer.main.get_command(app)
    names = []
    for name, command in group.commands.items():
        names.append(f"coda {name}")
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                names += [*parameter.opts, *parameter.secondary_opts]
    return sorted({name for name in names if name != "--help"})


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
