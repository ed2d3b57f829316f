"""Where results and messages go: standard output and standard error."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn
from rich.table import Table

WIDE = 240
Own = TypeVar("Own", bound="Bar")


class _Progress(Progress):
    above: Callable[[], RenderableType] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None:
            yield self.above()
        yield from super().get_renderables()


class Bar:
    """A progress bar on a terminal, and nothing elsewhere, for as long as the work goes on."""

    def __init__(
        self,
        console: Console,
        last: ProgressColumn,
        above: Callable[[], RenderableType] | None = None,
    ) -> None:
        """`above`: what stands above the bar."""
        self.bar = _Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            last,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar.above = above

    def __enter__(self: Own) -> Own:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()


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
        shown.add_row(*(escape(visible(cell)) for cell in row))
    return shown


def say(console: Console, text: str, style: str | None = None) -> None:
    """A line of plain text: brackets are no markup, and a name commands no terminal."""
    console.print(visible(text), markup=False, style=style)


def print_json(content: object) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    # A name that is not Unicode has its bytes as JSON's own escapes.
    print(text.encode("utf-8", "backslashreplace").decode())  # noqa: T201


def printable(name: str) -> str:
    """A file's name as text, whatever bytes it has."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def visible(text: str) -> str:
    """The text with control characters written out."""
    return "".join(
        letter if letter == "\n" or unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp")
        else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )  # fmt: skip
