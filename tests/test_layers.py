"""Imports point one way: errors, metrics <- model, data <- methods <- training <- learner <- …"""

from __future__ import annotations

import ast
from pathlib import Path

import coda_prompt

ROOT = Path(coda_prompt.__file__).parent
LAYERS = [
    {"errors", "metrics", "preprocessing", "seeding", "storage", "console", "shutdown"},
    {"model", "data"},
    {"methods"},
    {"training"},
    {"learner"},
    {"bench", "serve"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        own = [name.split(".") for name in names if name.split(".")[0] == "coda_prompt"]
        found |= {parts[1] for parts in own if len(parts) > 1 and not parts[1].startswith("__")}
    return found


def arrows() -> list[tuple[str, str]]:
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    return [(room(path), target) for path in files for target in imported_rooms(path)]


def test_every_module_has_its_room() -> None:
    rooms = {room(path) for path in ROOT.rglob("*.py")} - {"__init__", "assets"}
    assert rooms <= LEVEL.keys()


def test_imports_point_one_way() -> None:
    found = arrows()
    assert len(found) > 20
    wrong = [
        (source, target)
        for source, target in found
        if source != target and LEVEL[target] >= LEVEL[source] and LEVEL[source] > 0
    ]
    bottom = [(s, t) for s, t in found if LEVEL[s] == 0 and LEVEL[t] > 0]
    assert wrong + bottom == []


def test_there_is_no_pickle_and_no_eval() -> None:
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "eval", "exec"}, path
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not attributes & {"torch.load", "torch.save"}, path
