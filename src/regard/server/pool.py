"""The runs of `regard serve`: found by name or language pair, loaded when first used, reloaded when they change."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regard import devices, tasks
from regard.data.corpora import corpora
from regard.decoding.continuous import MAX_QUEUE, Engine, EngineRunner, Turn
from regard.decoding.engine_thread import EngineThread
from regard.errors import UserError, first_line
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.server.chat_process import TemplateProcess
from regard.server.registry import NotFound, fingerprint
from regard.tasks.generator import Generator
from regard.tasks.glossary import Glossary
from regard.tasks.translator import Translator
from regard.text import chat

MAX_BATCH_TOKENS = 1_000_000
CHECK_SECONDS = 1.0  # between two checks whether a run directory has changed
RETRY_SECONDS = 30.0  # between two attempts to load the same files
PAIR = re.compile(r"([a-z]{2,3})[-_]([a-z]{2,3})")
SUFFIX = re.compile(r"\.([a-z]{2,3})(?:\.gz|\.zst|\.xz)?")

Pair = tuple[str, str]


class Unavailable(Exception):
    """A run that could not be loaded."""


@dataclass(eq=False)
class ActiveModel:
    """A loaded model with its engine, and the number of requests that use it."""

    model: LoadedRun
    engine: Engine
    stamp: str  # of the files it was loaded from
    bytes: int
    glossary: Glossary | None = None  # of the run, for all requests
    chat: chat.ChatTemplate | None = None
    users: int = 0
    retired: bool = False  # accepts no new requests; its engine is closed when the last one ends

    def translator(self, **settings: Any) -> Translator:
        """A translator that shares the batches of the engine. It submits all its sentences at once."""
        settings = {"batch_tokens": MAX_BATCH_TOKENS, **settings}
        return replace(self.model.translator(**settings), runner=EngineRunner(self.engine))

    def generator(self, **settings: Any) -> Generator:
        settings = {"batch_tokens": MAX_BATCH_TOKENS, **settings}
        return replace(self.model.generator(**settings), runner=EngineRunner(self.engine))


@dataclass(eq=False)
class ServedRun:
    """A run of the server. Its model is loaded when it is first used."""

    name: str
    path: Path
    verb: str  # translate or generate
    pair: Pair | None
    created: int
    glossary: Glossary | None = None
    active: ActiveModel | None = None
    error: str | None = None  # why the last attempt to load it failed
    failed: str | None = None  # the stamp of the files of that attempt
    failed_at: float = 0.0
    used: float = 0.0  # when a request last used it
    checked: float = -math.inf  # when its files were last checked
    loading: threading.Lock = field(default_factory=threading.Lock)


def split_name(argument: str) -> tuple[str | None, Path]:
    """Split NAME=RUN; without a name, None.

    >>> split_name("en-es=runs/one"), split_name("runs/one")
    (('en-es', PosixPath('runs/one')), (None, PosixPath('runs/one')))
    """
    name, equals, path = argument.partition("=")
    return (name, Path(path)) if equals and name and "/" not in name else (None, Path(argument))


def language_pair(name: str, run: RunDir) -> Pair | None:
    """The languages of a translation run: from its name, its corpus or the suffixes of its files."""
    first = corpora(run.recipe.data)[0]
    texts = [name, first.corpus or "", run.path.resolve().name]
    for text in texts:
        if match := PAIR.fullmatch(text.lower()):
            return match[1], match[2]
    suffixes = [SUFFIX.fullmatch("".join(Path(str(file)).suffixes[-2:]).lower()) for file in _files(first)]
    if len(suffixes) == 2 and suffixes[0] is not None and suffixes[1] is not None:
        return suffixes[0][1], suffixes[1][1]
    return None


def _files(corpus: Any) -> list[Any]:
    """The first source file and the first target file of a corpus, if it has two."""
    sides = [getattr(corpus, "source", None), getattr(corpus, "target", None)]
    return [side[0] if isinstance(side, list) else side for side in sides if side]


def _stamp(run: Path) -> str:
    return "-".join(fingerprint(run / name) for name in ("run.json", "model.safetensors", chat.FILE))


class ModelPool:
    """All runs of a server."""

    def __init__(
        self,
        runs: Sequence[str],
        *,
        device: str = "auto",
        memory: int = 0,
        rows: int = 64,
        queue: int = MAX_QUEUE,
        observe: Callable[[str, Turn], None] | None = None,
        glossaries: Sequence[str] = (),
    ) -> None:
        """`runs` are run directories, or NAME=RUN; `memory` is the budget in bytes of all models (0: no limit).

        `glossaries` are files, each for all translation runs, or NAME=FILE.
        """
        devices.pick(device)
        self.device, self.memory, self.rows, self.queue, self.observe = device, memory, rows, queue, observe
        self.runs: dict[str, ServedRun] = {}
        self._lock = threading.Lock()
        self._thread = EngineThread()
        self._templates = TemplateProcess()
        for argument in runs:
            given, path = split_name(argument)
            run = RunDir(path)
            name = given or path.resolve().name
            if name in self.runs:
                raise UserError(f"two runs are called {name!r}: name one of them, as in other={path}")
            task = tasks.of(run.recipe)
            if task.verb not in ("translate", "generate"):
                raise UserError(f"{path} was trained on {task.trained_on}: it neither translates nor generates")
            pair = language_pair(name, run) if task.verb == "translate" else None
            self.runs[name] = ServedRun(name, path, task.verb, pair, int(run.path.stat().st_mtime))
        for argument in glossaries:
            self._add_glossary(*split_name(argument))

    def _add_glossary(self, name: str | None, file: Path) -> None:
        """Read the glossary of a run, or of all translation runs; the entries of a later one count."""
        glossary = Glossary.read(file)
        if name is not None and (name not in self.runs or self.runs[name].verb != "translate"):
            raise UserError(f"--glossary {name}={file}: no translation model is called {name!r}")
        for run in self.runs.values():
            if run.verb == "translate" and name in (None, run.name):
                run.glossary = glossary.with_defaults(run.glossary)

    # -- finding -------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> ServedRun:
        if name not in self.runs:
            raise NotFound(f"there is no model {name!r}; there are {', '.join(self.runs)}")
        return self.runs[name]

    def find_translator(self, source: str | None, target: str | None, model: str | None = None) -> ServedRun:
        """The run that translates between these languages (None: any), or the one with this name."""
        if model is not None:
            served = self.find(model)
            if served.verb != "translate":
                raise UserError(f"the model {model!r} does not translate")
            return served
        runs = [run for run in self.runs.values() if run.verb == "translate"]
        if not runs:
            raise NotFound("this server has no translation model")
        for run in runs:
            known = run.pair or (source, target)
            if source in (None, known[0]) and target in (None, known[1]):
                return run
        pairs = ", ".join(sorted({"-".join(run.pair) for run in runs if run.pair}))
        raise NotFound(f"no model translates from {source or 'any language'} to {target or 'any language'}: {pairs}")

    @property
    def pairs(self) -> list[Pair]:
        return sorted({run.pair for run in self.runs.values() if run.pair})

    # -- using ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, served: ServedRun) -> Iterator[ActiveModel]:
        """The loaded model of a run, which stays loaded until the context ends."""
        active = self._acquire(served)
        try:
            yield active
        finally:
            with self._lock:
                active.users -= 1
                ends = active.retired and not active.users
            if ends:
                active.engine.close()

    def _acquire(self, served: ServedRun) -> ActiveModel:
        active = self._current(served)
        while not self._add_user(active):  # it was unloaded since
            active = self._current(served)
        served.used = time.monotonic()
        self._unload_others(served)
        return active

    def _add_user(self, active: ActiveModel) -> bool:
        """Count a user of a model, unless it is retired."""
        with self._lock:
            active.users += not active.retired
            return not active.retired

    def _current(self, served: ServedRun) -> ActiveModel:
        """The model of a run; while another thread loads new files of it, the previous model."""
        before = served.active
        if not served.loading.acquire(blocking=before is None):
            assert before is not None
            return before
        try:
            return self._up_to_date(served)
        finally:
            served.loading.release()

    def _up_to_date(self, served: ServedRun) -> ActiveModel:
        """The model of the present files; if these cannot be loaded, the previous model.

        Files that could not be loaded are tried again when they change, or after a while.
        """
        now, active = time.monotonic(), served.active
        if active is not None and now - served.checked <= CHECK_SECONDS:
            return active
        served.checked, stamp = now, _stamp(served.path)
        if active is not None and active.stamp == stamp:
            served.error = None
            return active
        if served.failed != stamp or now - served.failed_at > RETRY_SECONDS:
            try:
                return self._load(served, stamp)
            except Exception as error:
                served.error, served.failed, served.failed_at = first_line(error), stamp, time.monotonic()
        if active is None:
            raise Unavailable(f"the model {served.name!r} could not be loaded: {served.error}")
        return active

    def _load(self, served: ServedRun, stamp: str) -> ActiveModel:
        """Load a run, whose files have this stamp, and retire the previous model."""
        model = LoadedRun.load(served.path, device=self.device)
        template = None
        if (served.path / chat.FILE).is_file():
            template = chat.ChatTemplate.of_run(served.path, model.tokenizers[1], self._templates.apply)
        if _stamp(served.path) != stamp:
            raise Unavailable("its files are being replaced")
        observe = None if self.observe is None else self._observer(served.name)
        engine = Engine(
            model.module,
            precision=model.precision,
            rows=self.rows,
            queue=self.queue,
            observe=observe,
            thread=self._thread,
        )
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.module.parameters())
        active = ActiveModel(model, engine.start(), stamp, size, served.glossary, template)
        with self._lock:
            before, served.active = served.active, active
        served.error, served.failed = None, None
        if before is not None:
            self._retire(before)
        return active

    def _observer(self, name: str) -> Callable[[Turn], None]:
        return lambda turn: self.observe(name, turn) if self.observe is not None else None

    def _retire(self, active: ActiveModel) -> None:
        with self._lock:
            active.retired = True
            ends = not active.users
        if ends:
            active.engine.close()

    def _unload_others(self, kept: ServedRun) -> None:
        """Unload the least recently used models if all together exceed the memory budget."""
        if not self.memory:
            return
        unloaded: list[ActiveModel] = []
        with self._lock:
            loaded = [(run, active) for run in self.runs.values() if (active := run.active) is not None]
            size = sum(active.bytes for _, active in loaded)
            for run, active in sorted(loaded, key=lambda one: one[0].used):
                if size > self.memory and run is not kept and not active.users:
                    size, run.active, active.retired = size - active.bytes, None, True
                    unloaded.append(active)
        for active in unloaded:
            active.engine.close()

    def load_all(self) -> None:
        """Load every run that the memory budget allows, so that no request waits for it; failures are recorded."""
        for run in self.runs.values():
            try:
                with self.using(run):
                    pass
            except Unavailable:
                continue

    def close(self) -> None:
        for active in self._active_models():
            active.engine.close()
        self._templates.close()

    def _active_models(self) -> list[ActiveModel]:
        """The loaded models; each is read once, because another thread may unload it."""
        return [active for run in self.runs.values() if (active := run.active) is not None]

    @property
    def waiting(self) -> int:
        """Sentences that wait in all engines."""
        return sum(active.engine.waiting for active in self._active_models())

    @property
    def queued(self) -> int:
        """Sentences that wait, as the limit of the queue counts them."""
        return sum(active.engine.queued for active in self._active_models())

    @property
    def running(self) -> int:
        return sum(active.engine.running for active in self._active_models())

    @property
    def failures(self) -> dict[str, str]:
        """The runs that could not be loaded when last tried, and why."""
        return {name: run.error for name, run in self.runs.items() if run.error is not None}
