"""Benchmark configuration: a validated preset or file, with overrides from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coda_prompt.errors import BadOption, CorruptFile, MissingData, UnknownName, bad_field
from coda_prompt.research import methods
from coda_prompt.research.methods import Entry
from coda_prompt.research.methods.base import MethodConfig
from coda_prompt.research.methods.coda import CodaConfig
from coda_prompt.research.methods.options import make_config
from coda_prompt.research.streams.stream_options import StreamOptions
from coda_prompt.research.training.augmentation import Augmentation
from coda_prompt.research.training.devices import Precision
from coda_prompt.research.training.fast import fast_views
from coda_prompt.research.training.settings import Training

Override = str | tuple[tuple[str, ...], Any]
"""`a.b.c=value` as text, or the path of a field and its value."""
Protocol = Literal["paper", "release-2022", "release-2023"]
RELEASES = ("release-2022", "release-2023")
PACKAGE = Path(__file__).parent


class Section(BaseModel):
    """Base of configuration sections; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MethodSection(Section):
    """A row of the table: a method with its options in this benchmark."""

    method: str | None = None
    """Name of the method. Default: the name of the row."""
    options: dict[str, Any] = {}
    """Options of the method that differ from its defaults."""
    training: dict[str, Any] = {}
    """Fields of `Training` for this row; they override those of the benchmark."""


class Benchmark(Section):
    """A benchmark with everything that determines its numbers."""

    name: str = Field(pattern=r"^[^/\\\x00]+$")
    """Name of the benchmark and of the folder with its runs."""
    description: str = ""
    minutes: float | None = Field(default=None, gt=0)
    """About how long the default methods and trials take on two CPU cores, from counted
    multiply-adds."""
    source: str
    """`pocket`, `cifar-100`, `imagenet-r`, `domainnet`, `hub:` with a dataset's name, folder or
    URL, `domains:` with a folder of domain folders, or an image folder."""
    data: Path | None = None
    """Folder with the paper's datasets. It does not identify a run: the data may be moved."""
    lists: Path | None = None
    """Folder with the dataset's train and test lists. Default: the data folder."""
    classes: int | None = Field(default=None, ge=1)
    """Number of classes the source must have; detects archives that were extracted in part."""
    strength: float | None = Field(default=None, ge=0)
    """Strength of pocket's styles. Default: the published one; 0: plain drawings."""
    backbone: str = "pocket"
    """Name in `coda backbones`, or the path of a .safetensors file."""
    preprocess: Literal["weights", "paper"] = "weights"
    """Normalize pixels as the weights declare, or leave them in [0, 1] as the paper does."""
    resize: Literal["crop", "squash"] = "crop"
    """Crop test images to a square, or resize without keeping the aspect ratio."""
    augmentation: Augmentation | None = None
    """Augmentation of training images."""
    stream: StreamOptions
    """How the data is cut into tasks."""
    measure_every: int = Field(default=1, ge=1)
    """Evaluate each time this number of tasks is learned, and at the end. Forgetting needs every
    task (1), but with thousands of tasks evaluation takes longer than training. Tasks in chunks are
    also evaluated after their last chunk."""
    trials: int = Field(default=5, ge=1, le=10_000)
    """Number of trials. Trials differ in their seed, which sets class order, splits and initial
    values for all methods."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first trial; the following ones count up."""
    protocol: Protocol | None = None
    """What to follow where paper and released code differ. Default: the library's own choices."""
    precision: Precision = "32-true"
    """Precision of the arithmetic; weights are stored in float32, with `64-true` in float64."""
    one_stage: bool = False
    """Take queries from the first blocks of the prompted pass, whose prompts then start one block
    later (option `query` of the prompt methods)."""
    fast: bool = False
    """Train with one augmented view for every two epochs, whose query is computed once: exact
    queries at nearly the cost of cached ones."""
    training: dict[str, Any] = {}
    """Fields of `Training` for every method; a method's own section overrides them."""
    demo: tuple[str, ...] = ()
    """Methods to run by default."""
    methods: dict[str, MethodSection]
    """Rows of the table, by name."""

    def method_of(self, row: str) -> str:
        """Return the name of a row's method."""
        return self.methods.get(row, MethodSection()).method or row

    def entry_of(self, row: str) -> Entry:
        """Return the registry entry of a row's method."""
        return methods.find(self.method_of(row))

    def method_config(self, name: str) -> MethodConfig:
        """Return the resolved options of a row; the stream sets the number of tasks."""
        entry = self.entry_of(name)
        options = dict(self.methods.get(name, MethodSection()).options)
        tasks = self.stream.number_of_tasks
        if "tasks" in entry.type.Config.__dataclass_fields__ and tasks is not None:
            options.setdefault("tasks", tasks)
        if issubclass(entry.type.Config, CodaConfig) and self.protocol is not None:
            options.setdefault("preset", self.protocol)
        if self.one_stage:
            options = {**methods.one_stage_options(entry), **options}
        return make_config(entry.type.Config, name, {**entry.options, **options})

    def method_training(self, name: str, seed: int) -> Training:
        """Return the resolved training settings of a row in the trial with this seed."""
        protocol = {"schedule": "lagging-cosine"} if self.protocol in RELEASES else {}
        own = self.methods.get(name, MethodSection()).training
        if "seed" in {**self.training, **own}:
            problem = "each trial has its own seed; set first_seed instead"
            raise BadOption(f"benchmark {self.name}", "training.seed", problem)
        fields = {**protocol, **self.training, **own, "seed": seed}
        what = f"the training of benchmark {self.name}"
        training = make_config(Training, what, fields)
        if not self.fast:
            return training
        views = fields.get("views") or fast_views(training.epochs)
        return make_config(Training, what, {**fields, "queries": "exact", "views": views})

    def resolved(self, names: Iterable[str]) -> Benchmark:
        """Return the benchmark with these rows only and every option and default written out."""
        sections = {}
        for name in names:
            training = asdict(self.method_training(name, 0))
            del training["seed"]
            own = {"options": asdict(self.method_config(name)), "training": training}
            sections[name] = MethodSection(method=self.method_of(name), **own)
        emptied: dict[str, Any] = {"training": {}, "protocol": None, "one_stage": False, "demo": ()}
        emptied["fast"] = False
        return self.model_copy(update={"methods": sections, **emptied})


class _Preset(BaseModel):
    """A file of a benchmark before it is resolved; all other fields are those of `Benchmark`."""

    model_config = ConfigDict(extra="allow")

    extends: str | None = None
    """A preset or file whose fields apply where this one has no other. Sections are merged field by
    field, except those tagged `!replace`."""
    variants: dict[Protocol, dict[str, Any]] = {}
    """What differs if `protocol` has this value; merged in the same way."""


def shipped(folder: str) -> list[str]:
    """List the YAML files in `presets` or `sweeps` of the package, without extension."""
    return sorted(path.stem for path in (PACKAGE / folder).glob("*.yaml"))


def preset_rows() -> list[dict[str, Any]]:
    """Describe every preset of the package: its fields as they are listed to users."""
    rows = []
    for name in shipped("presets"):
        preset = load_benchmark(name)
        rows.append(
            {
                "preset": name,
                "description": preset.description,
                "source": preset.source,
                "methods": list(preset.demo or preset.methods),
                "trials": preset.trials,
                "minutes": preset.minutes,
            }
        )
    return rows


def load_benchmark(name_or_path: str, overrides: Iterable[Override] = ()) -> Benchmark:
    """Load a preset by name, or a YAML or JSON file, apply overrides and validate it.

    Raises:
        UnknownName: A preset, field or method does not exist.
        BadOption: A value is invalid.
    """
    preset = _load_preset(name_or_path)
    fields = preset.model_extra or {}
    settings = _for_all_methods(fields, [_parse_override(override) for override in overrides])
    protocol = _apply(fields, settings).get("protocol")
    for released, variant in preset.variants.items():
        fields = _merge_nested(fields, variant) if released == protocol else fields
    fields = _apply(fields, settings)
    try:
        benchmark = Benchmark(**fields)
    except ValidationError as error:
        sections = {"stream": StreamOptions.model_fields, "methods": MethodSection.model_fields}
        known = {"": Benchmark.model_fields, **sections}
        raise bad_field(f"benchmark {name_or_path}", error, known) from error
    for name in benchmark.methods:
        benchmark.method_config(name)
        benchmark.method_training(name, 0)
    return benchmark


def _for_all_methods(
    fields: dict[str, Any], settings: list[tuple[tuple[str, ...], Any]]
) -> list[tuple[tuple[str, ...], Any]]:
    """Make `training.*` settings apply to every method, also to those that set it in the file.

    Settings of a single method take precedence over them, independent of their order.
    """
    methods = fields.get("methods")
    sections = methods if isinstance(methods, dict) else {}
    common = [setting for setting in settings if setting[0][0] == "training"]
    per_method = [
        (("methods", name, *path), value)
        for path, value in common
        for name, section in sections.items()
        if isinstance(section, dict) and path[-1] in (section.get("training") or {})
    ]
    return [*common, *per_method, *(setting for setting in settings if setting[0][0] != "training")]


def _load_preset(name_or_path: str, extended_by: Sequence[str] = ()) -> _Preset:
    """Read a preset; its fields are merged into those of the one that it extends."""
    owner = f"benchmark {name_or_path}"
    if name_or_path in extended_by:
        raise BadOption(owner, "extends", f"it extends itself ({' <- '.join(extended_by)})")
    fields = read_fields(name_or_path, "benchmark", "presets")
    try:
        base = _Preset.model_validate(fields).extends
        if base is not None:
            inherited = _load_preset(base, (*extended_by, name_or_path)).model_dump()
            fields = _merge_nested(inherited, fields)
        return _Preset.model_validate(fields)
    except ValidationError as error:
        raise bad_field(owner, error, {"": _Preset.model_fields}) from error


def read_fields(name_or_path: str, what: str, folder: str) -> dict[str, Any]:
    """Read a configuration file: by path, or by name from a folder of the package.

    Args:
        what: What the file describes, for messages.
        folder: `presets` or `sweeps`.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json"):
        if not path.is_file():
            remedy = f"Give the name of a {what} or a YAML file."
            raise MissingData(path, "there is no such file", remedy)
        text = path.read_bytes()
    else:
        known = shipped(folder)
        if name_or_path not in known:
            raise UnknownName(what, name_or_path, known)
        text = (PACKAGE / folder / f"{name_or_path}.yaml").read_bytes()
    try:
        fields = json.loads(text) if path.suffix == ".json" else yaml.load(text, _PresetLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        problem = f"is not valid YAML or JSON ({problem})"
        raise CorruptFile(name_or_path, problem, "Fix the file.") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        problem = f"does not describe a {what}, which has named fields such as `name: example`"
        raise CorruptFile(name_or_path, problem, "Fix the file.")
    return fields


class _Replacement(dict[Any, Any]):
    """Fields that replace those of a section that is extended, instead of being merged."""


class _PresetLoader(yaml.SafeLoader):
    """YAML loader that knows `!replace` and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                problem = f"'{key}' appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def _replacement(loader: _PresetLoader, node: yaml.MappingNode) -> _Replacement:
    return _Replacement(loader.construct_mapping(node, deep=True))


_PresetLoader.add_constructor("!replace", _replacement)


def _merge_nested(fields: Any, update: Any) -> Any:
    """Return nested fields, overridden by those of `update`."""
    if isinstance(update, _Replacement) or not isinstance(update, dict):
        return update
    fields = fields if isinstance(fields, dict) else {}
    merged = {key: _merge_nested(fields.get(key), value) for key, value in update.items()}
    return {**fields, **merged}


def _parse_override(override: Override) -> tuple[tuple[str, ...], Any]:
    if not isinstance(override, str):
        return override
    path, equals, value = override.partition("=")
    if not equals:
        raise BadOption("the command line", "set", f"'{override}' is not field=value")
    return tuple(path.split(".")), parse_value(value)


def parse_value(text: str) -> Any:
    """Parse a value as JSON, else as YAML: YAML alone would read 1e-3 as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(text, _PresetLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadOption("the command line", "set", f"'{text[:200]}' is not a value") from error


def _apply(
    fields: dict[str, Any], settings: Iterable[tuple[tuple[str, ...], Any]]
) -> dict[str, Any]:
    """Return a copy of the fields with these settings, creating sections as needed."""
    fields = {**fields}
    for path, value in settings:
        *parents, name = path
        section = fields
        for parent in parents:
            inner = section.get(parent) or {}
            if not isinstance(inner, dict):
                problem = f"'{parent}' in '{'.'.join(path)}' has no fields"
                raise BadOption("the command line", "set", problem)
            section[parent] = section = {**inner}
        section[name] = value
    return fields


def check_rows(benchmark: Benchmark, names: Sequence[str]) -> None:
    """Check that these rows exist, or are methods of a file (`file.py:Class`)."""
    for name in names:
        if ".py:" not in name and name not in benchmark.methods:
            raise UnknownName("method", name, benchmark.methods, benchmark.name)
