"""Count the package's lines of code and list its long functions.

    python tools/count_lines.py [FOLDER] [--longer-than 60]

Rule: a line counts if it holds a token that is neither a comment nor part of a docstring; blank
lines do not count. A docstring is any expression statement that is only a string, so the strings
that describe a field below it are left out too. The lines of a function run from its `def` to its
end, decorators excluded, counted by the same rule; nested functions are part of the outer one.

Before the restructuring (commit 2e74820): 10683 lines, 3 functions over 60
lines (`bench.runner.execute` 100, `ContinualClassifier.learn` 74, `learner.command.learn` 66).
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "coda_prompt"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCE)
    parser.add_argument("--longer-than", type=int, default=60, metavar="LINES")
    given = parser.parse_args()
    packages: Counter[str] = Counter()
    long = []
    for path in sorted(given.folder.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        lines = code_lines(path, tree)
        inside = path.relative_to(given.folder)
        packages[inside.parts[0] if len(inside.parts) > 1 else "(top level)"] += len(lines)
        for name, node in functions(tree):
            last = node.end_lineno or node.lineno
            count = sum(node.lineno <= line <= last for line in lines)
            if count > given.longer_than:
                long.append((count, f"{inside.as_posix()}:{node.lineno} {name}"))
    for package, count in sorted(packages.items()):
        print(f"{count:6}  {package}")
    print(f"{packages.total():6}  total")
    print(f"functions over {given.longer_than} lines: {len(long)}")
    for count, where in sorted(long, reverse=True):
        print(f"{count:6}  {where}")


def code_lines(path: Path, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE]
    described = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return {
        line
        for token in tokens
        for line in range(token.start[0], token.end[0] + 1)
        if line not in described
    }


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their qualified names, methods and nested ones included."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                yield prefix + node.name, node
        yield from functions(node, inner)


if __name__ == "__main__":
    main()
