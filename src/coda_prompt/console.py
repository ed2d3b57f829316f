"""Console output: results go to standard output, messages and progress to standard error."""

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

PIPE_WIDTH = 240

Self = TypeVar("Self", bound="ProgressBar")


class _Progress(Progress):
    above: Callable[[], RenderableType] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None:
            yield self.above()
        yield from super().get_renderables()


class ProgressBar:
    """Context manager that shows a progress bar if the console is a terminal."""

    def __init__(
        self,
        console: Console,
        last_column: ProgressColumn,
        above: Callable[[], RenderableType] | None = None,
    ) -> None:
        """`above` renders what is shown above the bar."""
        self.bar = _Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            last_column,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar.above = above

    def __enter__(self: Self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()


def stdout_console() -> Console:
    """Return a console for results; lines written to a file or pipe are not wrapped at 80."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def stderr_console() -> Console:
    """Return a console for messages and progress."""
    return Console(stderr=True, highlight=False)


def table(headers: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> Table:
    """Make a table of plain text: no markup in cells, no wrapping in the first column."""
    result = Table(title=None if title is None else escape(title))
    for column, header in enumerate(headers):
        result.add_column(escape(header), no_wrap=column == 0, overflow="fold")
    for row in rows:
        result.add_row(*(escape(escape_control_characters(cell)) for cell in row))
    return result


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line of plain text, without markup and with control characters escaped."""
    console.print(escape_control_characters(text), markup=False, style=style)


def print_json(content: object) -> None:
    """Print JSON to standard output; file names that are not valid Unicode are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode())  # noqa: T201


def decode_file_name(name: str) -> str:
    """Return a file name as printable text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def escape_control_characters(text: str) -> str:
    """Escape control characters, so that a name cannot send commands to the terminal."""
    escaped = {"Cc", "Cs", "Zl", "Zp"}  # control, surrogate, line and paragraph separator
    return "".join(
        each.encode("unicode_escape", "surrogatepass").decode("ascii")
        if each != "\n" and unicodedata.category(each) in escaped
        else each
        for each in text
    )
