"""Load what a benchmark runs on: its data, cut into tasks, and its backbone."""

from __future__ import annotations

from coda_prompt.errors import MissingData
from coda_prompt.images.sources import Source
from coda_prompt.research.bench.config import Benchmark
from coda_prompt.research.streams.opening import open_source
from coda_prompt.research.streams.stream import Stream, make_stream
from coda_prompt.research.vit.catalog import LoadedBackbone, load_backbone


class InputCache:
    """Backbone and data of the last run, reused as long as the next run needs the same."""

    FIELDS = frozenset({"source", "data", "lists", "classes", "strength", "backbone"})

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}
        self._inputs: tuple[LoadedBackbone, Source] | None = None

    def load(self, benchmark: Benchmark) -> tuple[LoadedBackbone, Source]:
        """Return backbone and data; missing data are reported before a backbone is downloaded."""
        fields = benchmark.model_dump(include=set(self.FIELDS))
        if self._inputs is None or fields != self._fields:
            source = load_source(benchmark)
            self._fields, self._inputs = fields, (load_backbone(benchmark.backbone), source)
        return self._inputs


def load_source(benchmark: Benchmark) -> Source:
    """Open the benchmark's data and check its number of classes."""
    options = benchmark.model_dump(include={"data", "lists", "strength"})
    source = open_source(benchmark.source, **options)
    classes = len(source.class_names)
    if benchmark.classes not in (None, classes):
        problem = f"it has {classes} classes, but {benchmark.name} is made for {benchmark.classes}"
        remedy = "Look for a part that was not extracted. To run on a part of it on purpose, set "
        raise MissingData(benchmark.source, problem, f"{remedy}classes={classes}.")
    return source


def load_stream(benchmark: Benchmark, source: Source, seed: int) -> Stream:
    """Cut the data into the tasks of one trial."""
    return make_stream(source, benchmark.stream, seed=seed)
