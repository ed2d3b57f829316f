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
    """The two floors, their packages, and the direction of their imports."""
    drawing = Drawing(1010, 470, "Packages of coda-prompt; arrows point to what imports them")
    drawing.box(14, 14, 982, 190, [], GREY)
    drawing.text(30, 42, "research/: trains and compares methods, with torch", "b")
    drawing.box(30, 60, 130, 56, ["vit/", "the ViT, its weights"])
    drawing.box(30, 134, 130, 56, ["streams/", "data cut into tasks"])
    drawing.box(220, 60, 150, 56, ["methods/", "one file per method"], ORANGE)
    drawing.box(430, 60, 150, 56, ["training/", "engine, checkpoints"])
    drawing.box(640, 60, 150, 56, ["bench/", "presets, runs, reports"])
    drawing.box(220, 134, 150, 56, ["export.py", "ViT to ONNX graphs"], GREEN)
    drawing.box(430, 134, 150, 56, ["lessons.py", "trains prompts"])
    drawing.arrow((160, 88), (218, 88))
    drawing.arrow((370, 88), (428, 88))
    drawing.arrow((580, 88), (638, 88))
    drawing.arrow((160, 162), (190, 162), (190, 125), (400, 125), (400, 104), (428, 104))
    drawing.arrow((295, 116), (295, 132))
    drawing.arrow((505, 116), (505, 132))

    drawing.box(14, 244, 982, 212, [], GREY)
    drawing.text(30, 446, "classifier: NumPy, ONNX Runtime, no torch", "b")
    base = ["base", "storage/, errors,", "console, seeding,", "shutdown"]
    drawing.box(30, 308, 130, 100, base)
    drawing.box(220, 292, 150, 56, ["images/", "files to pixels"])
    drawing.box(430, 292, 150, 56, ["encoder/", "pixels to features"], GREEN)
    drawing.box(430, 384, 150, 56, ["statistics/", "sums and solutions"])
    drawing.box(
        640, 330, 150, 74, ["learner/", "LearnedModel, lesson,", "predict, ModelFolder"], GREEN
    )
    drawing.box(846, 292, 120, 56, ["serve/", "HTTP, the page"])
    drawing.box(846, 384, 120, 56, ["cli/", "coda"])
    drawing.arrow((160, 340), (218, 322))
    drawing.arrow((160, 390), (428, 412))
    drawing.arrow((370, 320), (428, 320))
    drawing.arrow((580, 320), (638, 350))
    drawing.arrow((580, 412), (638, 384))
    drawing.arrow((790, 350), (844, 322))
    drawing.arrow((790, 384), (844, 410))
    drawing.arrow((906, 348), (906, 382))
    drawing.arrow((250, 292), (250, 224), (95, 224), (95, 192))
    drawing.arrow((790, 88), (984, 88), (984, 412), (968, 412))
    drawing.arrow((330, 190), (330, 224), (490, 224), (490, 290), dashed=True)
    drawing.arrow((580, 162), (715, 162), (715, 328), dashed=True)
    drawing.text(728, 230, "dashed: imported when it is needed", "s")
    return drawing.svg()


def _chain(title: str, names: Sequence[Sequence[str]]) -> str:
    """Draw steps from left to right."""
    widths = [max(92, 9 * max(len(line) for line in lines) + 14) for lines in names]
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
                ["image"],
                ["decode", "upright, 8 bits"],
                ["Encoder.encode", "pixels to features"],
                ["scores", "a product"],
                ["probabilities", "temperature"],
                ["unknown", "typicality, rule"],
                ["top-k"],
            ],
        ),
        "lesson.svg": _chain(
            "Learn",
            [
                ["folder"],
                ["decode, encode", "each image once"],
                ["hold out", "a fifth of a class"],
                ["findings", "warnings, hints"],
                ["add sums, solve", "of the rest, of all"],
                ["measure", "accuracy, temperature"],
                ["LearnedModel"],
                ["commit"],
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
