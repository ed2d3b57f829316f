"""Options: frozen pydantic dataclasses, checked with messages that name the field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from coda_prompt.errors import BadOption, OddPromptLength, TooManyBlocks, UnknownName
from coda_prompt.model.vit import ViT

STRICT = ConfigDict(extra="forbid")
Config = TypeVar("Config")


def make_config(config_type: type[Config], owner: str, options: Mapping[str, Any]) -> Config:
    """A validated configuration; an unknown or unusable option is named."""
    known = [field.name for field in fields(config_type)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise UnknownName(f"option of {owner}", name, known)
    try:
        return config_type(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][:1]) or "?"
        raise BadOption(owner, field, first["msg"].lower()) from error


def option_meanings(config_type: type[Any]) -> dict[str, str]:
    """The sentence under each field of a config class: help texts come from the source."""
    meanings = {}
    for owner in reversed(config_type.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in pairwise(body.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                meanings[field.target.id] = " ".join(str(below.value.value).split())
    return meanings


def check_length(field: str, length: int) -> None:
    if length % 2:
        raise OddPromptLength(field, length)


def check_blocks(field: str, blocks: tuple[int, ...], backbone: ViT) -> None:
    depth = backbone.config.depth
    if len(set(blocks)) < len(blocks):
        raise BadOption("the method", field, f"{blocks} names a block twice")
    if any(block < 0 or block >= depth for block in blocks):
        raise TooManyBlocks(blocks, depth)
