"""Reference pages of the HTTP interface (from OpenAPI) and of model files (from their schema)."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from fastapi import FastAPI

from coda_prompt import __version__
from coda_prompt.learner import records
from coda_prompt.research.methods.options import option_meanings
from coda_prompt.serve import app, schemas

HTTP = """# HTTP interface

`coda serve` serves these routes; [Serve a model](../guide/serving.md) shows how to call them.
With several models, the first has the routes below and each other one the same routes below
`/models/NAME`. A running service has this page at `/docs`, with forms to try each route, and the
document it is made from at `/openapi.json`.

Errors are problem documents (RFC 9457, `application/problem+json`) with the fields of `Problem`.

"""
MODEL_FORMAT = """# Model file format

A model is a folder. `model.safetensors` is the model; everything else is for people, for `undo`,
or temporary.

| file | content |
|---|---|
| `model.safetensors` | what was learned, without the backbone, and its description |
| `versions/NUMBER.safetensors` | up to ten earlier and undone versions, in the same format |
| `config.json` | the description again, readable |
| `README.md` | the model card |
| `.progress/`, `.learning.json` | only while a lesson is unfinished: checkpoints, what it learns |
| `.lock`, `.lock.owner` | the lock of a writer and its process number |

## The file

A [safetensors](https://huggingface.co/docs/safetensors) file with one entry of metadata,
`description`: a JSON object with the fields below and `sha256`. That hash is the SHA-256 of the
description (JSON with sorted keys, without `sha256`), followed by the hexadecimal SHA-256 of all
tensors: for each tensor in the order of their names its name, its torch type, its shape as a
Python tuple, and its bytes. A reader must refuse a file whose hash does not match. Equal content
gives equal bytes.

Tensors: `unknown.*` are counts, sums and second moments of the features of all classes, and the
histogram of scores that tells unknown images; `classifier.*` what scores classes, and its own sums
where they differ from these; `trained.*` prompts and the head of methods that train them;
`duplicates.*` hashes of images, if they were asked for. No tensor belongs to the backbone, which is
named by its fingerprint. Nothing in a model folder is executed, and no field is a path that a
reader follows.

Current format: {format}.
"""


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; line breaks in cells become spaces."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def http_page() -> str:
    """Return the page of the HTTP interface."""
    document = openapi()
    text = HTTP
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            text += _operation(verb, path, operation)
    text += "## Objects\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        if "properties" in schema and not name.startswith(("HTTPValidation", "Validation")):
            text += f"\n### {name}\n\n" + _fields(schema)
    return text


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a service, without starting one."""
    application = FastAPI(title="coda-prompt", version=__version__)
    for router in (*app.MODEL_ROUTERS, app.pages):
        application.include_router(router)
    return schemas.add_request_schemas(application.openapi())


def _operation(verb: str, path: str, operation: Mapping[str, Any]) -> str:
    text = f"## {verb.upper()} {path}\n\n{operation.get('description', operation['summary'])}\n\n"
    rows = [
        (f"`{each['name']}`", each["in"], _kind(each["schema"]), _meaning(each))
        for each in operation.get("parameters", [])
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append((f"`{kind}`", "body", _kind(content["schema"]), _form(content["schema"])))
    if rows:
        text += table(("parameter", "in", "type", "meaning"), rows) + "\n"
    successes = {code: each for code, each in operation["responses"].items() if code < "400"}
    for code, response in successes.items():
        kinds = [
            f"{_kind(content.get('schema', {}))} (`{kind}`)".strip()
            for kind, content in response.get("content", {}).items()
        ]
        text += f"Returns {code}: {' or '.join(kinds) or response['description']}.\n\n"
    return text


def _form(schema: Mapping[str, Any]) -> str:
    """Return the fields of a form with their meaning."""
    fields = schema.get("properties", {}).items()
    return ", ".join(f"`{name}` ({_kind(each)})" for name, each in fields)


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (
            f"`{name}`",
            _kind(each),
            "" if name in required else f"`{json.dumps(each.get('default'))}`",
            " ".join(each.get("description", "").split()),
        )
        for name, each in schema["properties"].items()
    ]
    return table(("field", "type", "default", "meaning"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in words."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if schema.get("format") == "binary":
        return "file"
    return str(schema.get("type", ""))


def _meaning(parameter: Mapping[str, Any]) -> str:
    """Return the description, the limits and the default of a parameter."""
    schema = parameter["schema"]
    parts = [str(parameter.get("description", "")).rstrip(".")]
    if "minimum" in schema and "maximum" in schema:
        parts.append(f"{schema['minimum']:g} to {schema['maximum']:g}")
    if "default" in schema:
        parts.append(f"default {schema['default']}")
    return "; ".join(part for part in parts if part)


def _annotation(annotation: Any) -> str:
    """Return a type as it is written in the code, without module names."""
    text = inspect.formatannotation(annotation)
    text = text.replace(f"{records.__name__}.", "").replace("typing.", "").replace(" | ", " or ")
    return re.sub(r"^Optional\[(.*)\]$", r"\1 or None", text)


def model_format_page() -> str:
    """Return the page of the model file format."""
    text = MODEL_FORMAT.format(format=records.FORMAT)
    for record in (
        records.Description,
        records.Options,
        records.BackboneRecord,
        records.TaskRecord,
        records.WatchedAccuracy,
        records.EditRecord,
    ):
        meanings, types = option_meanings(record), get_type_hints(record)  # without limits
        rows = [
            (f"`{name}`", f"`{_annotation(types[name])}`", meanings.get(name, ""))
            for name in record.model_fields
        ]
        summary = inspect.cleandoc(record.__doc__ or "")
        text += f"\n## {record.__name__}\n\n{summary}\n\n"
        text += table(("field", "type", "meaning"), rows)
    return text
