"""Write docs/reference/ from the code: command line, options, presets, HTTP, model files.

    python tools/write_reference.py

`tests/test_site.py` fails if a page differs from what this script writes.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import typer
from reference_formats import http_page, model_format_page, table

from coda_prompt.cli import app
from coda_prompt.encoder.catalog import CATALOG
from coda_prompt.research.bench.config import Benchmark, load_benchmark, read_fields, shipped
from coda_prompt.research.methods import METHODS, describe
from coda_prompt.research.methods.options import option_meanings
from coda_prompt.research.training.settings import Training

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/write_reference.py. Do not edit. -->\n\n"


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(FOLDER / name)


def pages() -> dict[str, str]:
    """Every generated page by file name."""
    return {
        "cli.md": NOTE + _command_line(),
        "options.md": NOTE + _options(),
        "presets.md": NOTE + _presets(),
        "http.md": NOTE + http_page(),
        "model-format.md": NOTE + model_format_page(),
    }


def _command_line() -> str:
    group: Any = typer.main.get_command(app)
    commands = [_command(name, command) for name, command in group.commands.items()]
    return "\n".join([f"# Command line\n\n{group.help}\n", *commands])


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([f"coda {name} [OPTIONS]", *(_argument(each) for each in arguments)])
    rows = [
        (
            f"`{_names(parameter)}`",
            _default(parameter),
            getattr(parameter, "help", None) or "",
        )
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "hidden", False)
    ]
    text = f"## coda {name}\n\n{inspect.cleandoc(command.help or '')}\n\n    {usage}\n\n"
    text += table(("argument or option", "default", "meaning"), rows)
    text += f"\n{command.epilog}\n" if command.epilog else ""
    inner = getattr(command, "commands", {})
    return "\n".join([text, *(_command(f"{name} {each}", inner[each]) for each in inner)])


def _argument(argument: Any) -> str:
    """Return an argument as in a usage line; Typer's own differs between its versions."""
    name = f"{argument.name.upper()}..." if argument.nargs == -1 else argument.name.upper()
    return name if argument.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return "`, `".join([*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or parameter.required or repr(value).startswith("<"):
        return ""
    return f"`{value}`" if not isinstance(value, bool) else ("on" if value else "off")


def _options() -> str:
    text = (
        "# Options of methods and training\n\n"
        "Set them with `--set methods.NAME.options.FIELD=VALUE` and `--set training.FIELD=VALUE` "
        "in `coda bench`. Methods of `coda learn` have the parameters of "
        "[`ContinualClassifier`](python/classifier.md). There are "
        f"{len(METHODS)} methods.\n\n## Training\n\n"
    )
    meanings = option_meanings(Training)
    defaults = dataclasses.asdict(Training())
    text += table(
        ("field", "default", "meaning"),
        [
            (f"`{field}`", f"`{value}`", meanings.get(field, ""))
            for field, value in defaults.items()
        ],
    )
    for name in METHODS:
        method = describe(name)
        rows = [
            (f"`{option['name']}`", f"`{option['default']}`", option["meaning"])
            for option in method["options"]
        ]
        text += f"\n## {name}\n\n{method['summary']}.\n\n"
        text += table(("option", "default", "meaning"), rows)
    text += "\n## Backbones\n\n" + table(
        ("name", "weights", "licence", "description"),
        [
            (
                *(f"`{entry.name}`", entry.repository or "in the package"),
                *(entry.licence, entry.description),
            )
            for entry in CATALOG.values()
        ],
    )
    return text


PAPER = ("imagenet-r-10", "cifar-100-10", "domainnet-5")
"""Presets of the paper's benchmarks; the others extend them."""
SIZES = ("components", "pool", "top", "length", "general_length", "expert_length")


def _presets() -> str:
    rows: list[tuple[str, ...]] = []
    for name in shipped("presets"):
        preset = read_fields(name, "benchmark", "presets")
        rows.append((f"`{name}`", preset.get("extends", ""), preset.get("description", "")))
    text = "# Benchmark presets\n\n`coda bench NAME`.\n\n"
    return text + table(("preset", "extends", "description"), rows) + _resolved_settings()


def _resolved_settings() -> str:
    """Return what the methods of the paper's benchmarks train with."""
    text = (
        "\n## Settings of the paper's benchmarks\n\nLearning rate and epochs of each method in "
        f"{', '.join(f'`{name}`' for name in PAPER)}, and the sizes of its prompts. With `--set "
        "protocol=release-2022` they are those in brackets, where they differ.\n\n"
    )
    plain = [load_benchmark(name) for name in PAPER]
    released = [load_benchmark(name, ["protocol=release-2022"]) for name in PAPER]
    rows = []
    for name in plain[0].methods:
        settings = [
            _changed(_training(one, name), _training(other, name))
            for one, other in zip(plain, released, strict=True)
        ]
        sizes = list(dict.fromkeys(_sizes(benchmark, name) for benchmark in plain))
        rows.append((f"`{name}`", *settings, "; `domainnet-5`: ".join(sizes) or "-"))
    return text + table(("method", *(f"`{name}`" for name in PAPER), "sizes"), rows)


def _sizes(benchmark: Benchmark, name: str) -> str:
    options = dataclasses.asdict(benchmark.method_config(name))
    return ", ".join(f"{size} {options[size]}" for size in SIZES if size in options)


def _training(benchmark: Benchmark, name: str) -> str:
    method = benchmark.entry_of(name).type
    if method.closed_form:
        return "nothing trains"
    training = benchmark.method_training(name, 0)
    rate = training.learning_rate or method.learning_rate
    return f"{rate:g}, {training.epochs} epochs"


def _changed(value: str, released: str) -> str:
    return value if value == released else f"{value} ({released})"


if __name__ == "__main__":
    main()
