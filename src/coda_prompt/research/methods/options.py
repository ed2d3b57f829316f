"""Options of methods and trainings: frozen pydantic dataclasses; errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from coda_prompt.errors import BadOption, bad_field, join_names

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
Config = TypeVar("Config")


def make_config(config_type: type[Config], owner: str, options: Mapping[str, Any]) -> Config:
    """Validate options; the error names an unknown option or an unusable value."""
    try:
        return config_type(**options)
    except ValidationError as error:
        known = [field.name for field in fields(config_type)]  # type: ignore[arg-type]
        raise bad_field(owner, error, {"": known}, kind="option") from error


def option_meanings(config_type: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a config class, for help texts."""
    return {
        name: " ".join(field.description.split())
        for owner in reversed(config_type.__mro__)
        for name, field in getattr(owner, "__pydantic_fields__", {}).items()
        if field.description
    }


def check_prompts(config: Any, depth: int, prompts: Mapping[str, str]) -> tuple[int, ...]:
    """Check the options of prompts and return the prompted blocks.

    Args:
        depth: Number of blocks of the ViT.
        prompts: Name of an option with blocks -> name of the option with their prompts' length.

    Raises:
        CodaError: A length is odd, or a block is named twice or does not exist.
    """
    used: dict[int, str] = {}
    for name, length in prompts.items():
        rows, blocks = getattr(config, length), getattr(config, name)
        if rows % 2:
            problem = f"{length} = {rows} is odd, but a prompt is split into keys and values"
            nearest = f"{rows - 1} or {rows + 1}" if rows > 1 else "2 or more"
            raise BadOption("the method", length, f"{problem}. Use {nearest}")
        if len(set(blocks)) < len(blocks):
            raise BadOption("the method", name, f"{blocks} names a block twice")
        if any(block < 0 or block >= depth for block in blocks):
            problem = f"{join_names(blocks, 20)} are configured, but this ViT has {depth} blocks"
            raise BadOption("the method", name, f"{problem}. Use numbers from 0 to {depth - 1}")
        if shared := sorted(used.keys() & set(blocks)):
            other = used[shared[0]]
            raise BadOption("the method", name, f"{shared} already have prompts by '{other}'")
        used |= dict.fromkeys(blocks, name)
    if prompts and not used:
        raise BadOption("the method", next(iter(prompts)), "prompts need at least one block")
    return tuple(used)
