"""Tables of the generated reference pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; line breaks in cells become spaces."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"
