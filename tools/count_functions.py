"""Count the functions of the package that one prediction and one lesson enter.

    python tools/count_functions.py [--list]

With CODA-P on the embedded pocket backbone:
(a) `ContinualClassifier.predict` of one image path;
(b) `ContinualClassifier.learn` of a first task: a folder of 2 classes x 6 drawings, 1 epoch.

Rule: a function is a code object whose file lies in the package's folder, counted once however
often and from whichever thread it is called. Methods, properties, nested functions and generator
functions count. Lambdas, comprehensions, generator expressions, class bodies and modules do not.
Functions that a library generates (dataclass `__init__`) have no file in the package and do not
count. Each operation runs once untraced first, so imports and caches of the process are not
counted; the traced one has a classifier of its own.

Before the restructuring (commit 2e74820): predict 75, learn 155 (from arrays instead of a folder:
141). An earlier count of that commit gave 74 and 154; its rule is not recorded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.data.pocket import pocket_source

PACKAGE = Path(coda_prompt.__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions, file by file")
    names = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        data, model = Path(folder) / "data", Path(folder) / "model"
        write_drawings(data)
        classifier = new_classifier()
        classifier.learn(data)
        classifier.save(model)
        operations: dict[str, Callable[[], Callable[[], object]]] = {
            "predict": lambda: predicting(model, data / "a" / "0.png"),
            "learn": lambda: learning(data),
        }
        print(f"package: {PACKAGE}")
        for name, prepared in operations.items():
            prepared()()  # imports and warms up
            entered = functions_entered(prepared())
            print(f"{name}: {len(entered)} functions")
            if names:
                print_by_file(entered)


def write_drawings(folder: Path) -> None:
    """Write 2 classes x 6 drawings of pocket."""
    train = pocket_source().train
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for number, index in enumerate((train.labels == label).nonzero()[0][:6]):
            train.image(int(index)).save(folder / name / f"{number}.png")


def new_classifier() -> ContinualClassifier:
    """Return a classifier with its backbone loaded, which is not part of a lesson, and without a
    display of the progress."""
    training = {"epochs": 1}
    classifier = ContinualClassifier(
        "pocket", "coda-p", training=training, device="cpu", verbose=False
    )
    assert classifier.network.classes == []
    return classifier


def predicting(model: Path, image: Path) -> Callable[[], object]:
    classifier = ContinualClassifier.load(model, device="cpu")
    return lambda: classifier.predict(str(image))


def learning(data: Path) -> Callable[[], object]:
    classifier = new_classifier()
    return lambda: classifier.learn(data)


def functions_entered(operation: Callable[[], object]) -> set[CodeType]:
    """Code objects of the package's functions that run, in this thread and in new ones."""
    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in entered if counts(code)}


def counts(code: CodeType) -> bool:
    """Whether this is a function of the package; `<lambda>`, `<listcomp>` and `<module>` are not,
    nor is a class body, which is no function with local variables of its own."""
    of_function = bool(code.co_flags & 0x0002)  # CO_NEWLOCALS
    in_package = Path(code.co_filename).resolve().is_relative_to(PACKAGE)
    return of_function and in_package and not code.co_name.startswith("<")


def print_by_file(entered: set[CodeType]) -> None:
    files: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for code in entered:
        name = getattr(code, "co_qualname", code.co_name)
        file = Path(code.co_filename).resolve().relative_to(PACKAGE).as_posix()
        files[file].append((code.co_firstlineno, name))
    for file, found in sorted(files.items()):
        print(f"  {file} ({len(found)})")
        for line, name in sorted(found):
            print(f"    {line}: {name}")


if __name__ == "__main__":
    main()
