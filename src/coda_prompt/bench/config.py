"""What a benchmark is: a validated preset, overridden by a file and the command line."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coda_prompt import methods
from coda_prompt.data.images import Augmentation
from coda_prompt.errors import BadOption, CorruptFile, MissingData, UnknownName
from coda_prompt.methods.base import MethodConfig
from coda_prompt.methods.coda import CodaConfig
from coda_prompt.methods.options import make_config
from coda_prompt.training.engine import Training

Protocol = Literal["paper", "release-2022", "release-2023"]
RELEASES = ("release-2022", "release-2023")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamSection(_Section):
    """How the source is cut into tasks."""

    tasks: int | None = Field(default=None, ge=1)
    classes_per_task: int | None = Field(default=None, ge=1)
    remove_domains: int = Field(default=0, ge=0)
    """Domains taken out of each task's training images (the dual shift)."""
    validation: bool = False
    """Test on a fifth of the training images; no test image is read."""


class MethodSection(_Section):
    """What a method does differently in this benchmark."""

    options: dict[str, Any] = {}
    training: dict[str, Any] = {}


class Benchmark(_Section):
    """A benchmark and everything that decides its numbers."""

    name: str
    description: str = ""
    source: str
    """`pocket`, `cifar-100`, `imagenet-r`, `domainnet`, `hub:owner/name`, or an image folder."""
    data: Path | None = None
    """The folder the paper's datasets lie in. Another place for the same data is the same run."""
    lists: Path | None = None
    """The folder of the dataset's train and test lists; None: beside the data."""
    classes: int | None = Field(default=None, ge=1)
    """How many the source has to have: half of an archive is not a smaller benchmark."""
    strength: float | None = Field(default=None, ge=0)
    """Of pocket's styles; None: the published one; 0: plain ink."""
    backbone: str = "pocket"
    preprocess: Literal["weights", "paper"] = "weights"
    """Pixels as the weights declare them, or plain [0, 1] as the paper fed them."""
    resize: Literal["crop", "squash"] = "crop"
    augmentation: Augmentation | None = None
    stream: StreamSection
    trials: int = Field(default=5, ge=1)
    """Seeds 0, 1, …: each fixes class order, splits and initial values for all methods."""
    protocol: Protocol | None = None
    """Whose word counts where paper and released code differ; None: the library's defaults."""
    training: dict[str, Any] = {}
    """Fields of `Training` for every method; a method's own section goes before it."""
    demo: tuple[str, ...] = ()
    """Methods that run where none are named."""
    methods: dict[str, MethodSection]

    def method_config(self, name: str) -> MethodConfig:
        """A method's options; components are shared out over the stream's tasks."""
        entry = methods.find(name)
        options = dict(self.methods.get(name, MethodSection()).options)
        if "tasks" in entry.type.Config.__dataclass_fields__ and self.stream.tasks is not None:
            options.setdefault("tasks", self.stream.tasks)
        if issubclass(entry.type.Config, CodaConfig) and self.protocol is not None:
            options.setdefault("preset", self.protocol)
        return make_config(entry.type.Config, name, {**entry.options, **options})

    def method_training(self, name: str, seed: int) -> Training:
        protocol = {"schedule": "lagging-cosine"} if self.protocol in RELEASES else {}
        own = self.methods.get(name, MethodSection()).training
        fields = {**protocol, **self.training, **own, "seed": seed}
        return make_config(Training, "the training", fields)


def preset_names() -> list[str]:
    folder = resources.files("coda_prompt") / "bench" / "presets"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if _is_yaml(file))


def load_benchmark(name_or_path: str, overrides: Iterable[str] = ()) -> Benchmark:
    """A preset by name or a YAML file, with `field.field=value` overrides, validated.

    Its section `release` holds what the released scripts do otherwise in this benchmark. It is
    laid over the other fields under a `release-*` protocol, below the overrides.
    """
    fields = _merged(name_or_path)
    released = fields.pop("release", {})
    if not isinstance(released, dict):
        raise BadOption(f"benchmark {name_or_path}", "release", "needs fields of a benchmark")
    overrides = list(overrides)
    if _overridden(fields, overrides).get("protocol") in RELEASES:
        fields = _laid_over(fields, released)
    fields = _overridden(fields, overrides)
    try:
        benchmark = Benchmark(**fields)
    except ValidationError as error:
        raise _bad_option(f"benchmark {name_or_path}", error) from error
    for name in benchmark.methods:
        benchmark.method_config(name)
        benchmark.method_training(name, 0)
    return benchmark


def _merged(name_or_path: str) -> dict[str, Any]:
    """The fields of a preset; `like: other` takes over that preset's where it has none."""
    fields = _read(name_or_path)
    base = fields.pop("like", None)
    if base is None:
        return fields
    if not isinstance(base, str):
        raise BadOption(f"benchmark {name_or_path}", "like", "needs the name of a preset")
    inherited = _merged(base)
    return {**inherited, **fields}


def _read(name_or_path: str) -> dict[str, Any]:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        if not path.is_file():
            raise MissingData(path, "there is no such file", "Name a preset or a YAML file.")
        text = path.read_text("utf-8")
    else:
        if name_or_path not in preset_names():
            raise UnknownName("benchmark", name_or_path, preset_names())
        preset = resources.files("coda_prompt") / "bench" / "presets" / f"{name_or_path}.yaml"
        text = preset.read_text("utf-8")
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CorruptFile(name_or_path, f"is not YAML ({error})") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise CorruptFile(name_or_path, "does not describe a benchmark")
    return fields


def _laid_over(fields: Any, above: Any) -> Any:
    """Nested fields, with those of `above` before them."""
    if not (isinstance(fields, dict) and isinstance(above, dict)):
        return above
    inner = {key: _laid_over(fields.get(key), value) for key, value in above.items()}
    return {**fields, **inner}


def _overridden(fields: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Fields with each `a.b.c=value` set; the value is read as YAML."""
    fields = {**fields}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise BadOption("the command line", "set", f"'{override}' is not field=value")
        *parents, last = path.split(".")
        place = fields
        for parent in parents:
            inner = place.get(parent) or {}
            if not isinstance(inner, dict):
                raise BadOption("the command line", "set", f"'{parent}' in '{path}' has no fields")
            place[parent] = place = {**inner}
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadOption("the command line", "set", f"'{text}' is not a value") from error
    return fields


def _bad_option(owner: str, error: ValidationError) -> BadOption | UnknownName:
    """One message about the first thing wrong."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"stream": StreamSection, "methods": MethodSection}
        section = sections.get(path.split(".")[0], Benchmark) if "." in path else Benchmark
        return UnknownName(f"field of {owner}", str(first["loc"][-1]), section.model_fields)
    return BadOption(owner, path or "?", str(first["msg"]).lower())


def _is_yaml(file: Any) -> bool:
    return bool(file.name.endswith(".yaml"))
