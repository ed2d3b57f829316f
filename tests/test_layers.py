"""Imports point one way (storage <- images <- ... <- cli) and run on any system."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import coda_prompt
from coda_prompt.images.folders import folder_source
from coda_prompt.images.sources import Split
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.storage import files

ROOT = Path(coda_prompt.__file__).parent
LAYERS = [
    {"errors", "seeding", "storage", "console", "shutdown"},
    {"images"},
    {"encoder", "statistics"},
    {"research.seeding", "research.tensors", "research.vit", "research.streams"},
    {"learner"},
    {"serve"},
    {"research.methods"},
    {"research.export"},
    {"research.training"},
    {"research.lessons", "research.bench"},
    {"cli"},
    {"__main__"},
]
LAZY = {("encoder", "research.export")}
"""Imports against the direction, inside functions that say which extra they need."""
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(parts: Sequence[str]) -> str:
    """Return the package of a module from the parts of its name."""
    return ".".join(parts[:2] if parts[0] == "research" else parts[:1])


def package_of_file(path: Path) -> str:
    return package_of(path.relative_to(ROOT).with_suffix("").parts)


def imported_packages(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        ours = [name.split(".") for name in names if name.split(".")[0] == "coda_prompt"]
        packages |= {
            package_of(parts[1:])
            for parts in ours
            if len(parts) > 1 and not parts[1].startswith("__")
        }
    return packages


def imports() -> list[tuple[str, str]]:
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    return [(package_of_file(path), target) for path in files for target in imported_packages(path)]


def test_every_package_has_a_layer() -> None:
    packages = {package_of_file(path) for path in ROOT.rglob("*.py")} - {
        "__init__",
        "assets",
        "research.__init__",
    }
    assert packages <= LEVEL.keys()


def test_imports_point_one_way() -> None:
    pairs = [
        (source, target)
        for source, target in imports()
        if source.startswith("research") or not target.startswith("research")
    ]  # of the research floor from below: the next test
    assert len(pairs) > 20
    wrong = [
        (source, target)
        for source, target in pairs
        if source != target
        and LEVEL[target] >= LEVEL[source]
        and LEVEL[source] > 0
        and (source, target) not in LAZY
    ]
    bottom = [(s, t) for s, t in pairs if LEVEL[s] == 0 and LEVEL[t] > 0]
    assert wrong + bottom == []


LAZY = {
    "learner/lesson.py": {"coda_prompt.research.lessons"},
    "encoder/made.py": {"coda_prompt.research.export"},
    **{f"cli/{name}.py": {"coda_prompt.research"} for name in ("bench", "catalog", "options")},
}
"""Modules of the classifier that may import the research floor, inside functions: to train prompts,
to make an encoder of other weights, and for commands of the floor itself."""


def test_the_classifier_imports_neither_torch_nor_research() -> None:
    """Functions included; `learn` and the commands of the research floor load it when they run."""
    floor = [path for path in ROOT.rglob("*.py") if "research" not in path.relative_to(ROOT).parts]
    assert len(floor) > 60
    for path in floor:
        tree = ast.parse(path.read_text("utf-8"))
        typing = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        typing = [node for node in typing if ast.unparse(node.test) == "TYPE_CHECKING"]
        skipped = {id(each) for node in typing for each in ast.walk(node)}
        for node in (each for each in ast.walk(tree) if id(each) not in skipped):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            allowed = LAZY.get(path.relative_to(ROOT).as_posix(), set())
            for name in names:
                assert name.split(".")[0] not in {"torch", "lightning", "lightning_fabric"}, path
                research = name.startswith("coda_prompt.research")
                assert not research or name.startswith(tuple(allowed)), f"{path}: {name}"
                assert not research or node not in tree.body, f"{path}: {name} at the top"


WITHOUT_TORCH = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lightning_fabric", "lightning", "matplotlib"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Refused())
from coda_prompt.cli import app
for command in COMMANDS:
    try:
        app(command)
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
print(ContinualClassifier.load(sys.argv[1]).classes_)
"""


def test_the_classifier_runs_without_torch(drawing_folders: Path, tmp_path: Path) -> None:
    model, test = str(tmp_path / "model"), drawing_folders / "test"
    name = sorted(path.name for path in (drawing_folders / "task-1").iterdir())[0]
    commands = [
        ["learn", model, str(drawing_folders / "task-1")],
        ["learn", model, str(drawing_folders / "task-2"), "--find-duplicates"],
        ["predict", model, str(test), "--unknown", "auto", "--json"],
        ["evaluate", model, str(test), "--skip-bad", "--json"],
        *(["rename", model, name, "zero"], ["forget", model, "zero", "--yes"], ["undo", model]),
        *(["redo", model], ["history", model], ["info", model], ["learn", "--help"]),
    ]
    program = WITHOUT_TORCH.replace("COMMANDS", repr(commands)).replace(
        "from coda_prompt.cli import app",
        "from coda_prompt import ContinualClassifier\nfrom coda_prompt.cli import app",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, model], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert name not in done.stdout.splitlines()[-1]


def test_there_is_no_pickle_and_no_eval() -> None:
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "eval", "exec"}, path
        unpickler = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "pickle"
            for alias in node.names
        }
        # CIFAR is published as a pickle; its unpickler restricts what a file may refer to.
        allowed = {"Unpickler", "UnpicklingError"} if path.name == "cifar_pickle.py" else set()
        assert unpickler == allowed, path
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert "torch.save" not in attributes, path
        # torch.load may read a user's checkpoint, as tensors only; a bare reference is none.
        safe = sum(
            ast.unparse(node.func) == "torch.load"
            and "weights_only=True" in [ast.unparse(each) for each in node.keywords]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        )
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert sum(ast.unparse(node) == "torch.load" for node in used) == safe, path
        assert not safe or path.name == "weights.py", path


def test_no_function_has_more_than_60_lines_of_code() -> None:
    tool = Path(__file__).parents[1] / "tools" / "count_lines.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    assert "functions over 60 lines: 0" in done.stdout, done.stdout


# -- macOS and Windows


POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}


def test_modules_that_windows_lacks_are_imported_inside_functions_only() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not POSIX_ONLY & set(names), path


@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_splits_can_be_sent_to_spawned_workers(kind: str, drawing_folders: Path) -> None:
    arrays = kind == "arrays"
    source = pocket_source() if arrays else folder_source(drawing_folders / "task-1")
    split: Split = source.train
    copy = pickle.loads(pickle.dumps(split))
    assert np.array_equal(np.asarray(copy.image(3)), np.asarray(split.image(3)))


def test_a_file_that_is_being_read_is_replaced_when_the_reader_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace, refused = tmp_path / "model", Path.replace, []

    def replace_while_read(self: Path, target: Path) -> Path:
        if len(refused) < 2:
            refused.append(target)
            raise PermissionError(13, "in use")
        return replace(self, target)

    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", replace_while_read)
    monkeypatch.setattr(files, "REPLACE_RETRIES", 5)
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert len(refused) == 2
    assert list(tmp_path.iterdir()) == [path]
