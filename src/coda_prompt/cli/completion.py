"""Completion of method and backbone names, read from the source: importing torch takes seconds."""

import ast
from collections.abc import Iterator
from importlib import resources


def complete_method(incomplete: str) -> list[str]:
    """Return the names of methods that start like this."""
    return sorted(name for name in method_names() if name.startswith(incomplete))


def complete_backbone(incomplete: str) -> list[str]:
    """Return the names of backbones that start like this."""
    return sorted(name for name in ("auto", *backbone_names()) if name.startswith(incomplete))


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
