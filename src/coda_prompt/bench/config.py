"""What a benchmark is: a validated preset, overridden by a file and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coda_prompt import methods
from coda_prompt.data.images import Augmentation
from coda_prompt.errors import BadOption, CorruptFile, MissingData, UnknownName
from coda_prompt.methods import Entry
from coda_prompt.methods.base import MethodConfig, PromptConfig
from coda_prompt.methods.coda import CodaConfig
from coda_prompt.methods.options import make_config
from coda_prompt.training.devices import Precision
from coda_prompt.training.settings import Training

Override = str | tuple[tuple[str, ...], Any]
"""`a.b.c=value`, or the path of a field and its value."""
Protocol = Literal["paper", "release-2022", "release-2023"]
RELEASES = ("release-2022", "release-2023")


class Section(BaseModel):
    """Fields of a file; unknown ones are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamSection(Section):
    """How the source is cut into tasks."""

    tasks: int | None = Field(default=None, ge=1)
    classes_per_task: int | None = Field(default=None, ge=1)
    remove_domains: int = Field(default=0, ge=0)
    """Domains taken out of each task's training images (the dual shift)."""
    validation: bool = False
    """Test on a fifth of the training images; no test image is read."""


class MethodSection(Section):
    """A row of the table: a method, and what it does differently in this benchmark."""

    method: str | None = None
    """Which method it is; None: the one of the row's own name."""
    options: dict[str, Any] = {}
    training: dict[str, Any] = {}


class Benchmark(Section):
    """A benchmark and everything that decides its numbers."""

    name: str = Field(pattern=r"^[^/\\\x00]+$")
    """Of the folder of its runs, too."""
    description: str = ""
    source: str
    """`pocket`, `cifar-100`, `imagenet-r`, `domainnet`, `hub:owner/name`, `shards:` and
    the path or address of tar files, or an image folder."""
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
    """Preprocessing as the weights declare them, or plain [0, 1] as the paper fed them."""
    resize: Literal["crop", "squash"] = "crop"
    augmentation: Augmentation | None = None
    stream: StreamSection
    measure_every: int = Field(default=1, ge=1)
    """Tasks between two rows of the accuracy matrix; the last is always there. Forgetting needs
    all of them, but for thousands of tasks they take longer than training."""
    trials: int = Field(default=5, ge=1, le=10_000)
    """Seeds, each fixing class order, splits and initial values for all methods."""
    first_seed: int = Field(default=0, ge=0)
    protocol: Protocol | None = None
    """Whose word counts where paper and released code differ; None: the library's defaults."""
    precision: Precision = "32-true"
    """Of the arithmetic; weights stay in float32 but under `64-true`."""
    one_stage: bool = False
    """Queries from the first blocks of the prompted pass itself, which has its prompts one block
    later then (prompt methods' option `query`)."""
    training: dict[str, Any] = {}
    """Fields of `Training` for every method; a method's own section goes before it."""
    demo: tuple[str, ...] = ()
    """Methods that run where none are named."""
    methods: dict[str, MethodSection]

    def method_of(self, row: str) -> str:
        return self.methods.get(row, MethodSection()).method or row

    def entry_of(self, row: str) -> Entry:
        return methods.find(self.method_of(row))

    def method_config(self, name: str) -> MethodConfig:
        """The options of a row; components are shared out over the stream's tasks."""
        entry = self.entry_of(name)
        options = dict(self.methods.get(name, MethodSection()).options)
        if "tasks" in entry.type.Config.__dataclass_fields__ and self.stream.tasks is not None:
            options.setdefault("tasks", self.stream.tasks)
        if issubclass(entry.type.Config, CodaConfig) and self.protocol is not None:
            options.setdefault("preset", self.protocol)
        if issubclass(entry.type.Config, PromptConfig) and self.one_stage:
            usual = asdict(make_config(entry.type.Config, name, dict(entry.options)))
            for field in (field for field in usual if field.endswith("blocks")):
                options.setdefault(field, tuple(block + 1 for block in usual[field]))
            options.setdefault("query", "early")
        return make_config(entry.type.Config, name, {**entry.options, **options})

    def method_training(self, name: str, seed: int) -> Training:
        """Of one trial, whose seed it is: no field sets that."""
        protocol = {"schedule": "lagging-cosine"} if self.protocol in RELEASES else {}
        own = self.methods.get(name, MethodSection()).training
        if "seed" in {**self.training, **own}:
            raise BadOption(
                f"benchmark {self.name}", "training.seed", "trials have seeds; set first_seed"
            )
        fields = {**protocol, **self.training, **own, "seed": seed}
        return make_config(Training, "the training", fields)

    def resolved(self, names: Iterable[str]) -> Benchmark:
        """These rows with every option said that methods and protocol would fill in."""
        sections = {}
        for name in names:
            training = asdict(self.method_training(name, 0))
            del training["seed"]
            options = asdict(self.method_config(name))
            sections[name] = MethodSection(
                method=self.method_of(name), options=options, training=training
            )
        said = {
            "methods": sections,
            "training": {},
            "protocol": None,
            "one_stage": False,
            "demo": (),
        }
        return self.model_copy(update=said)


def preset_names() -> list[str]:
    return shipped("presets")


def shipped(folder: str) -> list[str]:
    """Names of the YAML files in a folder of the package."""
    files = (file.name for file in _shipped_files(folder).iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def _shipped_files(folder: str) -> Path:
    return Path(__file__).parent / folder


def load_benchmark(name_or_path: str, overrides: Iterable[Override] = ()) -> Benchmark:
    """A preset by name or a YAML file, with fields overridden, validated.

    Its section `release` holds what the released scripts do otherwise in this benchmark. It is
    laid over the other fields under a `release-*` protocol, below the overrides.
    """
    fields = _merged(name_or_path)
    released = fields.pop("release", {})
    if not isinstance(released, dict):
        raise BadOption(f"benchmark {name_or_path}", "release", "needs fields of a benchmark")
    settings = _for_all_methods(fields, [_parsed(override) for override in overrides])
    if _overridden(fields, settings).get("protocol") in RELEASES:
        fields = _laid_over(fields, released)
    fields = _overridden(fields, settings)
    try:
        benchmark = Benchmark(**fields)
    except ValidationError as error:
        sections: dict[str, type[BaseModel]] = {"stream": StreamSection, "methods": MethodSection}
        raise bad_field(f"benchmark {name_or_path}", error, sections, Benchmark) from error
    for name in benchmark.methods:
        benchmark.method_config(name)
        benchmark.method_training(name, 0)
    return benchmark


def _for_all_methods(
    fields: dict[str, Any], settings: list[tuple[tuple[str, ...], Any]]
) -> list[tuple[tuple[str, ...], Any]]:
    """`training.…` from the command line is for every method, also one with its own in the file.

    What the command line says of one method goes before it, in whatever order they come.
    """
    methods = fields.get("methods")
    sections = methods if isinstance(methods, dict) else {}
    common = [setting for setting in settings if setting[0][0] == "training"]
    own = [
        (("methods", name, *path), value)
        for path, value in common
        for name, section in sections.items()
        if isinstance(section, dict) and path[-1] in (section.get("training") or {})
    ]
    return [*common, *own, *(setting for setting in settings if setting[0][0] != "training")]


def _merged(name_or_path: str) -> dict[str, Any]:
    """The fields of a preset; `like: other` takes over that preset's where it has none."""
    fields = read_fields(name_or_path, "benchmark", "presets")
    base = fields.pop("like", None)
    if base is None:
        return fields
    if not isinstance(base, str):
        raise BadOption(f"benchmark {name_or_path}", "like", "needs the name of a preset")
    inherited = _merged(base)
    return {**inherited, **fields}


def read_fields(name_or_path: str, what: str, folder: str) -> dict[str, Any]:
    """A file of fields: by its path, or by name from a folder of the package."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        if not path.is_file():
            raise MissingData(path, "there is no such file", f"Name a {what} or a YAML file.")
        text = path.read_bytes()
    else:
        known = shipped(folder)
        if name_or_path not in known:
            raise UnknownName(what, name_or_path, known)
        text = (_shipped_files(folder) / f"{name_or_path}.yaml").read_bytes()
    try:
        fields = json.loads(text) if path.suffix == ".json" else yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise CorruptFile(name_or_path, f"cannot be read as fields ({problem})") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise CorruptFile(name_or_path, f"does not describe a {what}")
    return fields


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a field that is there twice is a mistake, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key}' is there twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def _laid_over(fields: Any, above: Any) -> Any:
    """Nested fields, with those of `above` before them."""
    if not (isinstance(fields, dict) and isinstance(above, dict)):
        return above
    inner = {key: _laid_over(fields.get(key), value) for key, value in above.items()}
    return {**fields, **inner}


def _parsed(override: Override) -> tuple[tuple[str, ...], Any]:
    if not isinstance(override, str):
        return override
    path, equals, value = override.partition("=")
    if not equals:
        raise BadOption("the command line", "set", f"'{override}' is not field=value")
    return tuple(path.split(".")), parse_value(value)


def parse_value(text: str) -> Any:
    """JSON, or else YAML, whose numbers need a dot where JSON's do not (1e-3)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadOption("the command line", "set", f"'{text[:200]}' is not a value") from error


def _overridden(
    fields: dict[str, Any], overrides: Iterable[tuple[tuple[str, ...], Any]]
) -> dict[str, Any]:
    fields = {**fields}
    for path, value in overrides:
        *parents, last = path
        place = fields
        for parent in parents:
            inner = place.get(parent) or {}
            if not isinstance(inner, dict):
                whole = ".".join(path)
                raise BadOption("the command line", "set", f"'{parent}' in '{whole}' has no fields")
            place[parent] = place = {**inner}
        place[last] = value
    return fields


def bad_field(
    owner: str,
    error: ValidationError,
    sections: Mapping[str, type[BaseModel]],
    whole: type[BaseModel],
) -> BadOption | UnknownName:
    """One message about the first thing wrong."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = sections.get(path.split(".")[0], whole) if "." in path else whole
        return UnknownName(f"field of {owner}", str(first["loc"][-1]), section.model_fields)
    return BadOption(owner, path or "?", str(first["msg"]).lower())


def check_rows(benchmark: Benchmark, names: Sequence[str]) -> None:
    """That these rows exist, or are methods of a file."""
    for name in names:
        if ".py:" not in name and name not in benchmark.methods:
            raise UnknownName(f"method in {benchmark.name}", name, benchmark.methods)
