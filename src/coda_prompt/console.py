"""Where results and messages go: standard output and standard error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDE = 240


def output() -> Console:
    """Standard output; a file or a pipe gets lines as long as they need to be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDE, highlight=False)


def messages() -> Console:
    return Console(stderr=True, highlight=False)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> Table:
    """A table of plain text: brackets in names are no markup; the first column is not broken."""
    shown = Table(title=None if title is None else escape(title))
    for number, head in enumerate(heads):
        shown.add_column(escape(head), no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))  # noqa: T201


def printable(name: str) -> str:
    """A file's name as text, whatever bytes it has."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
