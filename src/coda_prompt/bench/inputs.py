"""What a benchmark runs on: its data, cut into tasks, and its backbone."""

from __future__ import annotations

from pathlib import Path

from coda_prompt.bench.config import Benchmark
from coda_prompt.data import hf_datasets, shards
from coda_prompt.data.folders import folder_source
from coda_prompt.data.paper import PAPER_DATASETS, paper_source
from coda_prompt.data.pocket import STRENGTH, pocket_source
from coda_prompt.data.sources import Source
from coda_prompt.data.stream import Stream, make_stream
from coda_prompt.errors import MissingData, UnknownName
from coda_prompt.model.catalog import LoadedBackbone, load_backbone


class Inputs:
    """Data and backbone of the run at hand, kept while the next run needs the same."""

    def __init__(self) -> None:
        self._key: object = None
        self._held: tuple[LoadedBackbone, Source] | None = None

    def of(self, benchmark: Benchmark) -> tuple[LoadedBackbone, Source]:
        """Missing data are told before a backbone is fetched."""
        deciding = {"source", "data", "lists", "classes", "strength", "backbone"}
        key = benchmark.model_dump(include=deciding)
        if self._held is None or key != self._key:
            source = load_source(benchmark)
            self._key, self._held = key, (load_backbone(benchmark.backbone), source)
        return self._held


def load_source(benchmark: Benchmark) -> Source:
    """The benchmark's data, with as many classes as it has to have."""
    source = _find_source(benchmark)
    if benchmark.classes not in (None, len(source.class_names)):
        raise MissingData(
            benchmark.source,
            f"it has {len(source.class_names)} classes, but {benchmark.name} is made for "
            f"{benchmark.classes}",
            "Look for a part that was not extracted. To run on a part of it on purpose, set "
            f"classes={len(source.class_names)}.",
        )
    return source


def _find_source(benchmark: Benchmark) -> Source:
    name = benchmark.source
    if name == "pocket":
        strength = STRENGTH if benchmark.strength is None else benchmark.strength
        return pocket_source(strength)
    if name in PAPER_DATASETS:
        return paper_source(name, benchmark.data, benchmark.lists)
    if name.startswith(hf_datasets.PREFIX):
        return hf_datasets.hub_source(name.removeprefix(hf_datasets.PREFIX))
    if name.startswith(shards.PREFIX):
        return shards.shard_source(name.removeprefix(shards.PREFIX))
    if Path(name).name == name and not Path(name).exists():
        raise UnknownName("source or folder", name, ("pocket", *PAPER_DATASETS))
    return folder_source(name)


def stream_of(benchmark: Benchmark, source: Source, seed: int) -> Stream:
    return make_stream(source, seed=seed, **benchmark.stream.model_dump())
