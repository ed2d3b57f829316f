"""The registry of methods. A method outside the package is named `path/to/file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from coda_prompt.errors import METHOD_MODULE, BadMethod, UnknownName
from coda_prompt.research.methods.base import Loss, Method, PromptConfig, PromptMethod, TaskBrief
from coda_prompt.research.methods.checking import check_returned_shapes
from coda_prompt.research.methods.options import make_config, option_meanings
from coda_prompt.research.methods.stages import Stage, TrainingBatch
from coda_prompt.research.vit.vit import ViT

__all__ = ["Loss", "Method", "PromptMethod", "Stage", "TaskBrief", "TrainingBatch"]


@dataclass(frozen=True)
class Entry:
    """A method: its class and the option values of its row in a results table."""

    name: str
    type: type[Method]
    options: Mapping[str, Any]
    sha256: str | None = None
    """The hash of the file a method was loaded from; None: it comes with the package."""


_CLASSES = MappingProxyType(
    {
        "upper-bound": "finetune.UpperBound",
        "er-5000": "replay.ExperienceReplay",
        "ft": "finetune.FineTuning",
        "ft++": "finetune.FineTuningMasked",
        "lwf-mc": "lwf.LearningWithoutForgetting",
        "l2p++": "l2p.L2P",
        "deep-l2p++": "l2p.L2P",
        "dualprompt": "dualprompt.DualPrompt",
        "coda-p": "coda.CodaPrompt",
        "coda-p-s": "coda.CodaPrompt",
        "ncm": "closedform.NearestClassMean",
        "ranpac": "ranpac.RanPAC",
        "slda": "slda.StreamingLDA",
        "coda-p-ranpac": "coda_ranpac.CodaRanPAC",
        "deep-ranpac": "ranpac.RanPAC",
        "coda-p-deep-ranpac": "coda_ranpac.CodaRanPAC",
        "token-ranpac": "ranpac.RanPAC",
        "coda-p-token-ranpac": "coda_ranpac.CodaRanPAC",
        "sd-lora": "sdlora.SDLoRA",
        "sd-lora-rr": "sdlora.SDLoRA",
        "inflora": "inflora.InfLoRA",
        "os-prompt": "osprompt.OSPrompt",
        "os-prompt++": "osprompt.OSPrompt",
        "loranpac": "loranpac.LoRanPAC",
        "slca": "slca.SLCA",
        "ease": "ease.EASE",
        "aper": "aper.APER",
        "tuna": "tuna.TUNA",
        "vq-prompt": "vqprompt.VQPrompt",
        "hide-prompt": "hide.HiDePrompt",
    }
)
"""Names of methods and where their classes are: a module is imported when its method is used."""


class _Registry(Mapping[str, Entry]):
    """The methods of the package by name."""

    def __getitem__(self, name: str) -> Entry:
        module, _, class_name = _CLASSES[name].partition(".")
        method = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)
        return Entry(name, method, method.variants[name])

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


METHODS: Mapping[str, Entry] = _Registry()


def find(name: str) -> Entry:
    """Find a method by its name, or load the class that `path/to/file.py:Class` names.

    Raises:
        UnknownName: No method has this name.
        BadMethod: The file cannot be loaded, or its class lacks a member of the contract.
    """
    if name in METHODS:
        return METHODS[name]
    if ".py:" in name:
        return _from_file(name)
    if name.endswith(".py"):
        raise BadMethod(name, f"name its class too, as {name}:Class")
    raise UnknownName("method", name, METHODS)


def make(name: str, backbone: ViT, **options: Any) -> Method:
    """Create a method that has learned nothing yet.

    Example:
        >>> method = make("coda-p", load_backbone("pocket").vit, components=20)
    """
    entry = find(name)
    config = make_config(entry.type.Config, name, {**entry.options, **options})
    method = entry.type(backbone, config)
    method.name = name
    return method


def one_stage_options(entry: Entry) -> dict[str, Any]:
    """Return the options with which a prompt method needs no second pass for its queries.

    Queries are the class tokens that enter the first prompted block, so that prompts start one
    block later than by default. Empty for methods without prompts.
    """
    if not issubclass(entry.type.Config, PromptConfig):
        return {}
    defaults = asdict(make_config(entry.type.Config, entry.name, entry.options))
    blocks = {name: value for name, value in defaults.items() if name.endswith("blocks")}
    later = {name: tuple(block + 1 for block in value) for name, value in blocks.items()}
    return {**later, "query": "early"}


def describe(name: str) -> dict[str, Any]:
    """Summary and options of a method as JSON values, read from its class and config."""
    entry = find(name)
    config = make_config(entry.type.Config, name, entry.options)
    meanings = option_meanings(entry.type.Config)
    options = [
        {"name": option, "default": value, "meaning": meanings.get(option, "")}
        for option, value in asdict(config).items()
    ]
    summary = (inspect.getdoc(entry.type) or "").split("\n")[0].removesuffix(".")
    if entry.options:
        summary += f" ({', '.join(f'{key} = {value}' for key, value in entry.options.items())})"
    return {"name": name, "summary": summary, "options": options}


def _from_file(spec: str) -> Entry:
    path, _, class_name = spec.rpartition(":")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadMethod(spec, f"{path} cannot be read ({error.strerror})") from error
    # A unique name: dataclasses and help texts look the module up again.
    location = hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()
    module_name = f"{METHOD_MODULE}{location[:16]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise BadMethod(spec, f"{path} cannot be loaded ({error})") from error
    method = getattr(module, class_name, None)
    if not isinstance(method, type):
        raise BadMethod(spec, f"there is no class '{class_name}' in {path}")
    if not issubclass(method, Method):
        base = "coda_prompt.research.methods.Method"
        raise BadMethod(spec, f"'{class_name}' does not inherit from {base}")
    if problem := contract_problem(method):
        raise BadMethod(spec, problem)
    check_returned_shapes(method, module_name, path)
    return Entry(class_name, method, {}, hashlib.sha256(content).hexdigest())


def contract_problem(method: type[Method]) -> str | None:
    """Describe what of the contract a class lacks or has changed; None: it is complete."""
    if not is_pydantic_dataclass(method.Config):
        return "its Config is not a pydantic dataclass"
    try:
        inspect.signature(method).bind("backbone", "config")
    except TypeError:
        return "its __init__ does not take (self, backbone, config)"
    if mistake := _signature_problem(method):
        return mistake
    missing = [
        getattr(method, name)
        for name in dir(method)
        if getattr(inspect.getattr_static(method, name), "__isabstractmethod__", False)
    ]
    for view in ("prepares_on", "concludes_on"):
        if getattr(method, view) not in (None, "plain", "augmented"):
            return f"its {view} is not None, 'plain' or 'augmented'"
    if not method.closed_form and method.loss is Method.loss:
        missing.append(Method.loss)
    if method.fits and method.fit is Method.fit:
        missing.append(Method.fit)
    members = [
        f"{each.__name__}({', '.join(inspect.signature(each).parameters)}) "
        f"({(inspect.getdoc(each) or '').splitlines()[0].rstrip('.')})"
        for each in missing
    ]
    return f"its class has no method {'; '.join(members)}" if members else None


def _signature_problem(method: type[Method]) -> str | None:
    """Describe a member of the contract that cannot be called as the engine calls it."""
    for name, own in inspect.getmembers(method, inspect.isfunction):
        contract = next((vars(base)[name] for base in Method.__mro__ if name in vars(base)), None)
        if own is contract or not inspect.isfunction(contract) or name.startswith("__"):
            continue
        expected = inspect.signature(contract).parameters
        try:
            inspect.signature(own).bind(*expected)
        except TypeError:
            found = ", ".join(inspect.signature(own).parameters)
            return f"its {name} takes ({found}), not ({', '.join(expected)})"
    return None
