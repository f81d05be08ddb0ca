"""The runs that are looked at: what is known of each, its models loaded when first wanted, and the latest traces."""

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
from regard.data.builtin import pairs
from regard.data.corpora import corpora
from regard.decoding.fill_mask import MASK_PATTERN
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
from regard.viz.standalone import colour_table

MODELS = 6  # held at once; snapshots are models too
TRACES = 32
TRACE_BYTES = 2**28  # of all of them, as they are carried; in memory they are a few times that
EXAMPLE_WORDS = 6

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class NotFound(LookupError):
    """What was asked for is not there."""


class WeightsChanged(Exception):
    """What was asked about has other weights by now."""


class LRUCache(Generic[Key, Value]):
    """A few things, of which the one longest unused goes first."""

    def __init__(self, count: int, weigh: Callable[[Value], int] = lambda value: 0, most: int = 0) -> None:
        self.count, self.weigh, self.most = count, weigh, most
        self._held: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._held[key] = value
            self._held.move_to_end(key)
            while len(self._held) > self.count or (len(self._held) > 1 and self._weight() > self.most):
                self._held.popitem(last=False)

    def _weight(self) -> int:
        return sum(map(self.weigh, self._held.values()))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, which weights it has (as `which` names them), and the lock of whoever uses it."""

    model: LoadedRun
    weights: str
    lock: Lock = field(default_factory=Lock)


class RunRegistry:
    """The runs by their ids, which are the names of their folders (numbered where two share one)."""

    def __init__(self, paths: Sequence[str | Path], *, device: str = "auto", text: str = "") -> None:
        devices.pick(device)  # or says now that there is none
        self.device, self.text = device, text
        self.runs: dict[str, RunDir] = {}
        for path in paths:
            run = RunDir(path)
            name = run.path.resolve().name
            names = (name, *(f"{name}-{number}" for number in range(2, len(paths) + 2)))
            self.runs[next(free for free in names if free not in self.runs)] = run
        self._models: LRUCache[tuple[str, int | None], LoadedModel] = LRUCache(MODELS)
        self._traces: LRUCache[str, Trace] = LRUCache(TRACES, lambda trace: trace.size, TRACE_BYTES)
        self._loading = Lock()
        self._drawing = Lock()  # of random numbers: vectors that are not learnt yet depend on the seed alone

    def run(self, name: str) -> RunDir:
        if name not in self.runs:
            raise NotFound(f"there is no run {name!r} here; there are {', '.join(self.runs)}")
        return self.runs[name]

    @contextmanager
    def using(self, name: str, step: int | None = None, weights: str | None = None) -> Iterator[LoadedModel]:
        """A model to oneself: searches may keep what they work with beside it."""
        held = self._held(name, step, weights)
        with held.lock:
            yield held

    def model(self, name: str, step: int | None = None, weights: str | None = None) -> LoadedRun:
        """The model of a run, or of one of its snapshots; where `weights` are named, with these or not at all."""
        return self._held(name, step, weights).model

    def _held(self, name: str, step: int | None, weights: str | None) -> LoadedModel:
        """The model with the weights that are on disk now: training replaces them when it finds better ones."""
        run = self.run(name)
        snapshots = {} if step is None else run.snapshots()
        if step is not None and step not in snapshots:
            known = ", ".join(map(str, snapshots)) or "none"
            raise NotFound(f"{name} has no snapshot of step {step}; there are {known}")
        file = run.best if step is None else snapshots[step]
        with self._loading:
            held = self._models.get((name, step))
            if held is None or held.weights != fingerprint(file):
                held = self._load(run, file)
                self._models.put((name, step), held)
        if weights not in (None, held.weights):
            raise WeightsChanged(f"the weights of {name} have changed since then: load the page again")
        return held

    def _load(self, run: RunDir, file: Path) -> LoadedModel:
        """The model of a file; if that is replaced while it is read, of the new one."""
        while True:
            weights, model = fingerprint(file), LoadedRun(run, self.device, file)
            _ = model.step  # is read from the file as well, when first asked for
            if fingerprint(file) == weights:
                return LoadedModel(model, weights)

    def trace(self, wanted: schemas.TraceBody) -> tuple[Trace, str]:
        """The trace that was asked for, the one at hand or a new one; and which weights it is of."""
        changes = to_json(parse(wanted.changes))
        key = digest(request_key(wanted.run, wanted.step, wanted.text, wanted.target, wanted.after, changes))
        with self.using(wanted.run, wanted.step, wanted.weights) as held:
            found = self._traces.get(f"{key}-{held.weights}")
            if found is None:
                about = {"target": wanted.target, "after": wanted.after, "run": wanted.run, "step": wanted.step}
                reload = partial(self.model, wanted.run, wanted.step, held.weights)
                found = record(held.model, wanted.text, changes=changes, reload=reload, **about)  # type: ignore[arg-type]
                self._traces.put(f"{key}-{held.weights}", found)
        return found, held.weights

    def kept(self, key: str) -> Trace:
        """A trace that was asked for before, by its own key and the name of its weights."""
        found = self._traces.get(key)
        if found is None:
            raise NotFound("this trace is no longer held: ask for it again")
        return found

    def positions(self, wanted: schemas.PositionsBody) -> position_study.PositionStudy:
        """Position vectors of a kind; of a run with learned ones its own."""
        table = None
        if wanted.run is not None and wanted.kind == "learned":
            if getattr(self.run(wanted.run).recipe.model, "positions", None) != "learned":
                raise UserError(f"{wanted.run} has not learnt its positions")
            table = position_study.table(self.model(wanted.run, wanted.step, wanted.weights).module)
        with self._drawing:
            return position_study.study(wanted.kind, wanted.length, wanted.width, wanted.base, table)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "text": self.text or next((example(run) for run in self.runs.values()), ""),
            "runs": [describe(name, run) for name, run in self.runs.items()],
            "colours": colour_table(),
            "limits": {
                "characters": schemas.CHARACTERS,
                "masks": schemas.MASKS,
                "requests": schemas.REQUESTS,
            },
        }


def fingerprint(file: Path) -> str:
    """A name for what is in a file, another one whenever it is written anew; of a file that is not there, none."""
    try:
        now = file.stat()
    except OSError:
        return ""
    return digest(f"{now.st_ino} {now.st_mtime_ns} {now.st_size}")


def describe(name: str, run: RunDir) -> dict[str, Any]:
    """What the page knows of a run before anything is asked of it."""
    recipe, settings, spec = run.recipe, run.recipe.model, tasks.of(run.recipe).trace
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
        "example": example(run),
        "has_gold": spec is not None and spec.has_alignment and has_gold(recipe),
        "positions": getattr(settings, "positions", "none"),
    }


def example(run: RunDir) -> str:
    """A text to begin with: a held-out one of a built-in corpus, or one that was looked at in training."""
    task = tasks.of(run.recipe)
    words = (_held_out(run) or _sample(run)).split()
    if task.verb == "generate":
        words = words[:EXAMPLE_WORDS]
    elif task.output == "fills" and not MASK_PATTERN.search(" ".join(words)):
        words = words[: 2 * EXAMPLE_WORDS] or ["the", "cat"]
        words[len(words) // 2] = "[MASK]"
    return " ".join(words)


def _held_out(run: RunDir) -> str:
    names = [corpus.corpus for corpus in corpora(run.recipe.data) if corpus.corpus is not None]
    if not names:
        return ""
    first = next(pairs(names[0], "test", 1))
    return first.source if tasks.of(run.recipe).has_source else first.target


def _sample(run: RunDir) -> str:
    """The first sentence that the run was tried on in training."""
    try:
        with open(run.path / "samples.jsonl", encoding="utf-8") as file:
            entry = json.loads(file.readline())
        return str(entry.get("source") or entry.get("prompt") or "")
    except (OSError, ValueError, AttributeError):
        return ""
