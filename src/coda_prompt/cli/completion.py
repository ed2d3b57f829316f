"""Completion of names of methods, backbones, presets and classes.

Nothing here imports torch, which takes seconds: methods are read from the source.
"""

import re
from importlib import resources
from pathlib import Path

import typer

from coda_prompt.errors import CodaError


def complete_method(incomplete: str) -> list[str]:
    """Return the names of methods that start like this."""
    names = _names("research/methods", "__init__.py", r'^ +"([^"]+)": "\w+\.\w+",$')
    return sorted(name for name in names if name.startswith(incomplete))


def complete_backbone(incomplete: str) -> list[str]:
    """Return the names of backbones that start like this."""
    from coda_prompt.encoder.catalog import CATALOG

    return sorted(name for name in ("auto", *CATALOG) if name.startswith(incomplete))


def complete_preset(incomplete: str) -> list[str]:
    """Return the names of benchmarks that start like this."""
    folder = resources.files("coda_prompt") / "research" / "bench" / "presets"
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


def _names(package: str, file: str, pattern: str) -> list[str]:
    """Return what a pattern finds in a source file of this package."""
    source = resources.files("coda_prompt") / package / file
    return re.findall(pattern, source.read_text("utf-8"), re.MULTILINE)
