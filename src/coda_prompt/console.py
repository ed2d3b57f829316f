"""Console output: results go to standard output, messages and progress to standard error."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich import progress
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from coda_prompt.errors import BadClassName

PIPE_WIDTH = 240


class ProgressBar(progress.Progress):
    """A progress bar, shown if the console is a terminal."""

    def __init__(
        self,
        console: Console | None = None,
        last_column: progress.ProgressColumn | None = None,
        above: Callable[[], RenderableType] | None = None,
    ) -> None:
        """
        Args:
            console: Default: standard error.
            last_column: Default: the time remaining.
            above: Renders what is shown above the bar.
        """
        self._above = above
        console, last = console or stderr_console(), last_column or progress.TimeRemainingColumn()
        text, bar = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24)
        columns = (text, bar, progress.TaskProgressColumn(), last)
        hidden = not console.is_terminal
        super().__init__(*columns, console=console, transient=True, disable=hidden)

    def stop(self) -> None:
        """Stop the display; up to rich 14.2, a hidden one would print an empty line."""
        if not self.disable:
            super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the parts of the display: rich calls this to draw it."""
        if self._above is not None:
            yield self._above()
        yield from super().get_renderables()


@dataclass(frozen=True)
class Output:
    """How much a command prints besides its result."""

    quiet: bool = False
    """No messages and no progress; warnings and errors remain."""

    def message(self, text: str) -> None:
        """Print plain text to standard error, unless quiet."""
        if not self.quiet:
            print_message(text)


def stdout_console() -> Console:
    """Return a console for results; lines written to a file or pipe are not wrapped at 80."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def stderr_console() -> Console:
    """Return a console for messages and progress."""
    return Console(stderr=True, highlight=False)


def duration(seconds: float) -> str:
    """Return a duration for people: `40 s`, `3 min`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def table(
    headers: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None
) -> Table:
    """Make a table of plain text: no markup in cells, no wrapping in the first column."""
    result = Table(title=None if title is None else escape(title))
    for column, header in enumerate(headers):
        result.add_column(escape(header), no_wrap=column == 0, overflow="fold")
    for row in rows:
        result.add_row(*(escape(escape_control_characters(str(cell))) for cell in row))
    return result


def print_result(text: str) -> None:
    """Print plain text to standard output, without markup and with control characters escaped."""
    stdout_console().print(escape_control_characters(text), markup=False)


def print_message(text: str, style: str | None = None) -> None:
    """Print plain text to standard error, without markup and with control characters escaped."""
    stderr_console().print(
        escape_control_characters(text), markup=False, style=style, soft_wrap=True
    )


def print_json(content: object, *, line: bool = False) -> None:
    """Print JSON to standard output, with control characters and invalid Unicode escaped.

    Args:
        content: What to print.
        line: On one line and at once, for one of many values.
    """
    text = json.dumps(content, indent=None if line else 2, ensure_ascii=False)
    print(escape_control_characters(text), flush=line)  # noqa: T201


def decode_file_name(name: str) -> str:
    """Return a file name as printable text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, surrogates, separators of lines and paragraphs, and characters that change
the direction of the text around them."""
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""Characters that nobody sees: those that Unicode calls default ignorable, and annotations."""


def class_name(text: str) -> str:
    """Return the one spelling of a class name, so that names that look alike are one class.

    It is in Unicode's form NFC, without invisible characters, and with single spaces.

    Raises:
        BadClassName: Nothing remains, or there are control characters.
    """
    name = " ".join(unicodedata.normalize("NFC", INVISIBLE.sub("", text)).split())
    if not name or CONTROL.search(text):
        raise BadClassName(text)
    return name


def is_valid_class_name(text: str) -> bool:
    """Return whether `class_name` accepts a text."""
    try:
        return bool(class_name(text))
    except BadClassName:
        return False


def escape_control_characters(text: str) -> str:
    """Escape control characters as JSON does, so that a name cannot send commands to the terminal.

    Line ends are left as they are.
    """
    return CONTROL.sub(
        lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text
    )
