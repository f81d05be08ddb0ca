"""Shared by all tests: a temporary cache, the order of files in parallel runs, and the table of invariants.

Every test marked `invariant` fills a cell of the table of invariants by model family. Workers of pytest-xdist send
their cells with their reports, and the table is assembled in the main process. A run that selects the whole table fails
if a cell is empty.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # run GPU kernels in the interpreter; Triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # a job that nohup started
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The machine may be busy. In CI the same examples are tried each time, so that a failure is one of the change.
settings.register_profile("patient", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("patient")

TESTS = Path(__file__).parent
INVARIANTS = TESTS / "invariants"

# The files (or test functions) that `pytest -m core` runs: the main path through the package, in under a minute.
CORE = (
    "attention/test_attention.py",
    "attention/test_kv_cache.py",
    "cli/test_cli_translate.py::test_lines_in_are_lines_out",
    "data/test_packing.py",
    "decoding/test_finished_hypotheses.py",
    "decoding/test_search.py",
    "models/test_gpt.py",
    "models/test_transformer.py",
    "test_blocks.py",
    "test_layers.py",
    "test_packed.py",
    "training/test_updates.py",
)

# The files that take longest, or folders whose files a worker gets as a whole: parallel runs start with them.
LONGEST = (
    "browser/",
    "invariants/test_kills.py",
    "kernels/test_kernels.py",
    "invariants/test_training.py",
    "invariants/test_decoding.py",
    "cli/test_cli_translate.py",
    "decoding/test_static_search.py",
    "invariants/test_forward.py",
    "planning/test_plan_trace.py",
    "training/test_runs.py",
    "training/test_resharding.py",
    "training/test_processes.py",
    "tasks/test_generator.py",
    "test_api.py",
)


def unit_of(nodeid: str) -> str:
    """Return what a worker of pytest-xdist gets as a whole: the file of a test, or its folder if LONGEST has it."""
    file = nodeid.split("::")[0].removeprefix("tests/")
    return next((unit for unit in LONGEST if file.startswith(unit)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist load`, distribute whole files, so that what their tests share is made once.

    `--dist loadgroup` would do that by marks, but pytest-xdist 3.8 ignores these with pytest 9.2, which does not let it
    add the name of a group to the id of a test.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return ByUnit(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which afterwards skips what was imported: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {unit: place for place, unit in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(unit_of(item.nodeid), len(order)))
    for item in items:
        node = f"{item.path.relative_to(TESTS)}::{getattr(item, 'originalname', item.name)}"
        if (node in CORE or node.split("::")[0] in CORE) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.core)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache the tokens of test corpora in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class Table:
    """Outcomes by invariant and family."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.columns: list[str] = []
        self.not_applicable: dict[tuple[str, str], str] = {}  # cells without a test, and why
        self.outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.notes: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "cell" not in properties:
            return
        self.rows, self.columns, not_applicable = properties["table"]
        self.not_applicable = {(row, column): why for row, column, why in not_applicable}
        cell = tuple(properties["cell"])
        if report.when == "call" or report.failed:
            self.outcomes[cell].append(report.outcome)
        if report.when == "call" and "close" in properties:
            self.notes[cell].append(tuple(properties["close"]))

    def empty(self) -> list[tuple[str, str]]:
        """Return the cells without a test that ran."""
        filled = {cell for cell, outcomes in self.outcomes.items() if set(outcomes) - {"skipped"}}
        filled |= self.not_applicable.keys()
        return [(row, column) for row in self.rows for column in self.columns if (row, column) not in filled]

    def cell(self, row: str, column: str) -> str:
        if (row, column) in self.not_applicable:
            return self.not_applicable[row, column]
        outcomes = self.outcomes[row, column]
        ran = [outcome for outcome in outcomes if outcome != "skipped"]
        failed = ran.count("failed")
        return "-" if not ran else f"{failed} of {len(ran)} FAILED" if failed else f"holds ({len(ran)})"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if _whole_table(session) and (self.empty() or not self.rows) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.rows:
            return
        write = terminalreporter.write_line
        terminalreporter.section("invariants by model family")
        wide = max(map(len, self.rows)) + 2
        write(" " * wide + "".join(f"{column:<18}" for column in self.columns))
        for row in self.rows:
            write(f"{row:<{wide}}" + "".join(f"{self.cell(row, column):<18}" for column in self.columns))
        for (row, column), counts in self.notes.items():
            close, total = (sum(numbers) for numbers in zip(*counts, strict=True))
            write(f"{row}, {column}: {close} of {total} results differed, by decisions within rounding")
        for row, column in self.empty() if _whole_table(terminalreporter._session) else []:
            write(f"ERROR: no test ran for {row!r} of the {column} family", red=True)


def _whole_table(session: pytest.Session | None) -> bool:
    """Return whether the run selected every invariant and was not stopped."""
    if session is None or session.shouldstop or session.shouldfail:
        return False
    options = session.config.option
    narrowed = options.keyword or options.deselect or options.ignore or options.ignore_glob or options.collectonly
    if narrowed or getattr(options, "lf", False) or options.markexpr not in ("", "not slow"):
        return False
    given = [Path(session.config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in session.config.args]
    return any(path in (INVARIANTS, *INVARIANTS.parents) for path in given)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "invariant(name): fills this row of the table of invariants")
    config.addinivalue_line("markers", "generates: runs only for families that generate text")
    config.addinivalue_line("markers", "reads_lines: runs only for families that read text")
    config.addinivalue_line("markers", "slow_families: slow for every model family but the Transformer")
    if not hasattr(config, "workerinput") and os.environ.get("PYTEST_XDIST_WORKER") is None:
        config.pluginmanager.register(Table(), "regard-invariants")
