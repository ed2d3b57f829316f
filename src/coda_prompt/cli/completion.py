"""Completion of names of methods, backbones, presets and classes.

Nothing here imports torch, which takes seconds: methods and backbones are read from the source.
"""

import ast
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import typer

from coda_prompt.errors import CodaError


def complete_method(incomplete: str) -> list[str]:
    """Return the names of methods that start like this."""
    return sorted(name for name in method_names() if name.startswith(incomplete))


def complete_backbone(incomplete: str) -> list[str]:
    """Return the names of backbones that start like this."""
    return sorted(name for name in ("auto", *backbone_names()) if name.startswith(incomplete))


def complete_preset(incomplete: str) -> list[str]:
    """Return the names of benchmarks that start like this."""
    folder = resources.files("coda_prompt") / "bench" / "presets"
    names = [each.name.removesuffix(".yaml") for each in folder.iterdir()]
    return sorted(name for name in names if name.startswith(incomplete))


def complete_class(context: typer.Context, incomplete: str) -> list[str]:
    """Return the classes of the command's model that start like this."""
    from coda_prompt.learner.store import read_description

    try:
        classes = read_description(Path(context.params["model"])).classes
    except (CodaError, OSError, KeyError, TypeError):
        return []  # there is no model yet
    return [name for name in classes if name.startswith(incomplete)]


def method_names() -> set[str]:
    """Return the names in the `variants` of every class of the methods."""
    folder = resources.files("coda_prompt") / "methods"
    sources = [each.read_text("utf-8") for each in folder.iterdir() if each.name.endswith(".py")]
    return {
        str(key.value)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "variants"
        for part in ast.walk(node.value)
        if isinstance(part, ast.Dict)
        for key, value in zip(part.keys, part.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Dict)
    }


def backbone_names() -> Iterator[str]:
    """Yield the name of each entry of the catalogue."""
    source = (resources.files("coda_prompt") / "model" / "catalog.py").read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_embedded", "_on_hub"):
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                yield str(name.value)
