"""The runs of the page: their descriptions, models (loaded on first use) and recent traces."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from regard import devices, tasks
from regard.data.builtin import CORPORA as PAIRS
from regard.data.builtin import pairs
from regard.data.corpora import corpora
from regard.errors import UserError
from regard.interpret import position_study
from regard.interpret.interventions import parse, to_json
from regard.interpret.trace import Trace, record, request_key
from regard.interpret.trace.alignment import has_gold
from regard.interpret.trace.record import heads_of, layers_of
from regard.interpret.trace.trace import digest
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.server import schemas
from regard.tasks.mask_filler import MASK_PATTERN
from regard.viz.standalone import colour_table

MAX_MODELS = 6  # in memory; snapshots count as models
MAX_TRACES = 32
MAX_TRACE_BYTES = 2**28  # of all traces, as stored; in memory they take a few times that
EXAMPLE_WORDS = 6

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class NotFound(LookupError):
    """The requested run, snapshot, trace or file does not exist."""


class WeightsChanged(Exception):
    """The weights of a run have changed since an earlier answer."""


class LRUCache(Generic[Key, Value]):
    """A thread-safe cache that drops the least recently used values.

    It is bounded by number and by total size, and keeps one value whatever its size. cachetools.LRUCache has one bound,
    and refuses a value that exceeds it.
    """

    def __init__(self, count: int, size_of: Callable[[Value], int] = lambda value: 0, max_size: int = 0) -> None:
        self.count, self.size_of, self.max_size = count, size_of, max_size
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self.count or (len(self._values) > 1 and self._size() > self.max_size):
                self._values.popitem(last=False)

    def _size(self) -> int:
        return sum(map(self.size_of, self._values.values()))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, the fingerprint of its weights, and a lock for its use."""

    model: LoadedRun
    weights: str
    lock: Lock = field(default_factory=Lock)


class RunRegistry:
    """The runs by id: the name of the run directory, with a number if several have the same name."""

    def __init__(self, paths: Sequence[str | Path], *, device: str = "auto", text: str = "") -> None:
        devices.pick(device)  # raises an error early if there is no such device
        self.device, self.text = device, text
        self.runs: dict[str, RunDir] = {}
        for path in paths:
            run = RunDir(path)
            name = run.path.resolve().name
            names = (name, *(f"{name}-{number}" for number in range(2, len(paths) + 2)))
            self.runs[next(free for free in names if free not in self.runs)] = run
        self._models: LRUCache[tuple[str, int | None], LoadedModel] = LRUCache(MAX_MODELS)
        self._traces: LRUCache[str, Trace] = LRUCache(MAX_TRACES, lambda trace: trace.size, MAX_TRACE_BYTES)
        self._loading = Lock()
        self._random = Lock()  # for the global random generator, which initialises position tables

    def run(self, name: str) -> RunDir:
        if name not in self.runs:
            raise NotFound(f"there is no run {name!r}; there are {', '.join(self.runs)}")
        return self.runs[name]

    @contextmanager
    def using(self, name: str, step: int | None = None, weights: str | None = None) -> Iterator[LoadedModel]:
        """Lock a model for exclusive use: searches keep state beside it."""
        loaded = self._loaded(name, step, weights)
        with loaded.lock:
            yield loaded

    def model(self, name: str, step: int | None = None, weights: str | None = None) -> LoadedRun:
        """Return the model of a run or snapshot; raise `WeightsChanged` if it no longer has these `weights`."""
        return self._loaded(name, step, weights).model

    def _loaded(self, name: str, step: int | None, weights: str | None) -> LoadedModel:
        """Return the model with the weights now on disk, which training may replace at any time."""
        run = self.run(name)
        snapshots = {} if step is None else run.snapshots()
        if step is not None and step not in snapshots:
            known = ", ".join(map(str, snapshots)) or "none"
            raise NotFound(f"{name} has no snapshot of step {step}; there are {known}")
        file = run.best if step is None else snapshots[step]
        with self._loading:
            loaded = self._models.get((name, step))
            if loaded is None or loaded.weights != fingerprint(file):
                loaded = self._load(run, file)
                self._models.put((name, step), loaded)
        if weights not in (None, loaded.weights):
            raise WeightsChanged(f"the weights of {name} have changed: reload the page")
        return loaded

    def _load(self, run: RunDir, file: Path) -> LoadedModel:
        """Load a model; start again if the file is replaced while it is read."""
        while True:
            weights, model = fingerprint(file), LoadedRun(run, self.device, file)
            _ = model.step  # a cached property that reads the file too
            if fingerprint(file) == weights:
                return LoadedModel(model, weights)

    def trace(self, body: schemas.TraceBody) -> tuple[Trace, str]:
        """Return the requested trace, from the cache or newly recorded, and the fingerprint of its weights."""
        changes = to_json(parse(body.changes))
        key = digest(request_key(body.run, body.step, body.text, body.target, body.after, changes))
        with self.using(body.run, body.step, body.weights) as loaded:
            trace = self._traces.get(f"{key}-{loaded.weights}")
            if trace is None:
                request = {"target": body.target, "after": body.after, "run": body.run, "step": body.step}
                reload = partial(self.model, body.run, body.step, loaded.weights)
                trace = record(loaded.model, body.text, changes=changes, reload=reload, **request)  # type: ignore[arg-type]
                self._traces.put(f"{key}-{loaded.weights}", trace)
        return trace, loaded.weights

    def cached_trace(self, key: str) -> Trace:
        """Return a recent trace by its key, which includes the fingerprint of its weights."""
        trace = self._traces.get(key)
        if trace is None:
            raise NotFound("this trace is no longer cached: request it again")
        return trace

    def positions(self, body: schemas.PositionsBody) -> position_study.PositionStudy:
        """Study a kind of position encoding; for learned ones the table of the run, if one is named."""
        table = None
        if body.run is not None and body.kind == "learned":
            if getattr(self.run(body.run).recipe.model, "positions", None) != "learned":
                raise UserError(f"{body.run} has no learned positions")
            table = position_study.table(self.model(body.run, body.step, body.weights).module)
        with self._random:
            return position_study.study(body.kind, body.length, body.width, body.base, table)

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `/api/runs`."""
        return {
            "version": 1,
            "text": self.text,
            "runs": [describe(name, run) for name, run in self.runs.items()],
            "colours": colour_table(),
            "limits": {
                "characters": schemas.MAX_CHARACTERS,
                "masks": schemas.MAX_MASKS,
                "requests": schemas.MAX_FILE_TRACES,
            },
        }


def fingerprint(file: Path) -> str:
    """Return a string that changes whenever the file is written; empty for a missing file."""
    try:
        now = file.stat()
    except OSError:
        return ""
    return digest(f"{now.st_ino} {now.st_mtime_ns} {now.st_size}")


def describe(name: str, run: RunDir) -> dict[str, Any]:
    """Return the description of a run for the page, without loading its model."""
    recipe, settings, spec = run.recipe, run.recipe.model, tasks.of(run.recipe).trace
    examples = examples_of(run)
    return {
        "id": name,
        "name": name,
        "path": str(run.path),
        "about": recipe.about,
        "family": settings.family,
        "task": None if spec is None else spec.kind,
        "step": None,
        "snapshots": list(run.snapshots()),
        "layers": layers_of(settings),
        "heads": heads_of(settings),
        "example": examples[0] if examples else example(run),
        "examples": examples,
        "has_gold": spec is not None and spec.has_alignment and has_gold(recipe),
        "positions": getattr(settings, "positions", "none"),
    }


def examples_of(run: RunDir) -> list[str]:
    """Return inputs to choose from, where inputs are not texts; none if the data of the run are no longer there."""
    try:
        return tasks.of(run.recipe).examples()
    except UserError:
        return []


def example(run: RunDir) -> str:
    """Return a first text: a test sentence of a built-in corpus, or a validation sample of the run."""
    task = tasks.of(run.recipe)
    words = (_test_sentence(run) or _sample(run)).split()
    if task.trace is not None and task.trace.joined:
        words = words[:EXAMPLE_WORDS]
    elif task.output == "fills" and not MASK_PATTERN.search(" ".join(words)):
        words = words[: 2 * EXAMPLE_WORDS] or ["the", "cat"]
        words[len(words) // 2] = "[MASK]"
    return " ".join(words)


def _test_sentence(run: RunDir) -> str:
    names = [corpus.corpus for corpus in corpora(run.recipe.data) if corpus.corpus in PAIRS]
    if not names or names[0] is None:
        return ""
    first = next(pairs(names[0], "test", 1))
    return first.source if tasks.of(run.recipe).has_source else first.target


def _sample(run: RunDir) -> str:
    """Return the first input in the validation samples of the run."""
    try:
        with open(run.path / "samples.jsonl", encoding="utf-8") as file:
            entry = json.loads(file.readline())
        return str(entry.get("source") or entry.get("prompt") or "")
    except (OSError, ValueError, AttributeError):
        return ""
