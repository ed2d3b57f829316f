"""Draw docs/images/*.svg: the method and the architecture.

    python tools/draw_diagrams.py

`tests/test_site.py` fails if a drawing differs from what this script draws.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
BLUE, ORANGE, GREEN, GREY = "#dbe9f6", "#fbe3cf", "#d9f0e3", "#eceff1"
BLUE_LINE, ORANGE_LINE, GREEN_LINE, GREY_LINE = "#2f6ea5", "#c05f12", "#1f8a5b", "#78909c"
LINES = {BLUE: BLUE_LINE, ORANGE: ORANGE_LINE, GREEN: GREEN_LINE, GREY: GREY_LINE}
STYLE = (
    "text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1c2830}"
    ".n{font-size:13px}.b{font-size:14px;font-weight:600}.s{font-size:11.5px;fill:#50626d}"
)


class Drawing:
    """An SVG of boxes, arrows and notes on a light card, readable on light and dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{html.escape(title)}">',
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#455a64"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def box(
        self, x: int, y: int, width: int, height: int, lines: Sequence[str], fill: str = BLUE
    ) -> None:
        """Draw a box; its first line is its name, the others explain it."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" '
            f'stroke="{LINES[fill]}" stroke-width="1.4"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            kind = "b" if number == 0 else "s"
            self.text(x + width / 2, top + 18 * number, line, kind, "middle")

    def text(self, x: float, y: float, text: str, kind: str = "n", anchor: str = "start") -> None:
        """Write one line."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through points with a tip at its end."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="#455a64" stroke-width="1.5"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def method() -> str:
    """CODA-Prompt: from an image to prefixes of attention blocks."""
    drawing = Drawing(960, 470, "How CODA-Prompt classifies an image")
    drawing.text(24, 34, "1  Query: the plain, frozen ViT", "b")
    drawing.box(24, 52, 96, 54, ["image"], GREY)
    drawing.box(168, 52, 170, 54, ["frozen ViT", "without prompts"])
    drawing.box(386, 52, 128, 54, ["query q(x)", "class token"], GREEN)
    drawing.arrow((120, 79), (166, 79))
    drawing.arrow((338, 79), (384, 79))

    drawing.text(24, 150, "2  Prompt: a weighted sum of components, for each prompted block", "b")
    components = ((24, "task 1", BLUE), (250, "task 2", BLUE), (476, "task 3", ORANGE))
    for x, task, fill in components:
        state = "trains now" if fill == ORANGE else "frozen"
        lines = [task, "components P, keys K,", f"attention vectors A: {state}"]
        drawing.box(x, 168, 206, 74, lines, fill)
        drawing.arrow((x + 103, 242), (x + 103, 282))
    drawing.arrow((514, 79), (740, 79), (740, 205), (692, 205), dashed=True)
    drawing.text(752, 140, "the same query for", "s")
    drawing.text(752, 157, "the components of all tasks", "s")
    drawing.box(24, 286, 658, 44, ["p = Σ αₘ Pₘ    with   αₘ = cos(q(x) ⊙ Aₘ, Kₘ)"], GREEN)

    drawing.text(24, 374, "3  Answer: the same ViT with prefixes", "b")
    drawing.box(24, 392, 96, 54, ["image"], GREY)
    drawing.box(
        168, 392, 346, 54, ["frozen ViT with prefixes", "p = [pK; pV] before keys and values"]
    )
    drawing.box(562, 392, 150, 54, ["head", "one row for each class"], ORANGE)
    drawing.box(760, 392, 176, 54, ["class", "calibrated probability"], GREY)
    drawing.arrow((120, 419), (166, 419))
    drawing.arrow((340, 330), (340, 390))
    drawing.arrow((514, 419), (560, 419))
    drawing.arrow((712, 419), (758, 419))
    drawing.box(760, 250, 176, 34, ["trains in this task"], ORANGE)
    drawing.box(760, 292, 176, 34, ["never changes"], BLUE)
    return drawing.svg()


def architecture() -> str:
    """The packages and the direction of their imports."""
    drawing = Drawing(1000, 300, "Packages of coda-prompt; arrows point to what builds on them")
    lines = ["base", "errors, metrics, seeding,", "preprocessing, shutdown,", "console, storage/"]
    drawing.box(20, 90, 168, 100, lines, GREY)
    drawing.box(234, 36, 168, 64, ["model/", "ViT, weights, catalogue"])
    drawing.box(234, 180, 168, 64, ["data/", "images, sources, streams"])
    drawing.box(448, 108, 140, 64, ["methods/", "one file per method"], ORANGE)
    drawing.box(634, 108, 150, 64, ["training/", "engine, checkpoints"])
    drawing.box(634, 208, 150, 74, ["learner/", "ContinualClassifier", "Predictor"], GREEN)
    drawing.box(826, 24, 150, 56, ["bench/", "presets, runs, reports"])
    drawing.box(826, 116, 150, 56, ["serve/", "HTTP service, page"])
    drawing.box(826, 217, 150, 56, ["cli/", "the coda command"], GREEN)
    drawing.arrow((188, 120), (232, 82))
    drawing.arrow((188, 160), (232, 198))
    drawing.arrow((402, 82), (446, 126))
    drawing.arrow((402, 198), (446, 154))
    drawing.arrow((588, 140), (632, 140))
    drawing.arrow((709, 172), (709, 206))
    drawing.arrow((784, 245), (804, 245), (804, 52), (824, 52))
    drawing.arrow((784, 245), (804, 245), (804, 144), (824, 144))
    drawing.arrow((901, 172), (901, 215))
    drawing.arrow((976, 52), (988, 52), (988, 245), (978, 245))
    return drawing.svg()


def _chain(title: str, names: Sequence[Sequence[str]]) -> str:
    """Draw steps from left to right."""
    widths = [max(92, 9 * max(len(line) for line in lines) - 8) for lines in names]
    drawing = Drawing(sum(widths) + 34 * len(names) + 6, 100, title)
    x = 20
    for number, (lines, width) in enumerate(zip(names, widths, strict=True)):
        drawing.box(x, 20, width, 60, lines, GREY if number in (0, len(names) - 1) else BLUE)
        if number:
            drawing.arrow((x - 34, 50), (x - 2, 50))
        x += width + 34
    return drawing.svg()


def drawings() -> dict[str, str]:
    """Return every drawing by file name."""
    return {
        "method.svg": method(),
        "architecture.svg": architecture(),
        "predict.svg": _chain(
            "Predict",
            [
                ["input"],
                ["preprocess"],
                ["batch"],
                ["method.logits", "query, prompts, head"],
                ["probabilities"],
                ["unknown", "rule"],
                ["top-k"],
            ],
        ),
        "train.svg": _chain(
            "Train",
            [
                ["source"],
                ["stream"],
                ["task"],
                ["stages", "views, query, loss, step"],
                ["fit"],
                ["evaluation", "a row of the matrix"],
                ["run folder", "report"],
            ],
        ),
    }


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawings().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
